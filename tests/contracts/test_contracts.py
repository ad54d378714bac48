"""What hepatch relies on in its hosts: whether it holds in the installed releases, and what happens where it does not.

A contract that fails here means that a host has moved: its message says what, and what hepatch does until it is taught.
Each way in which it could move is tried as well, on the real hosts in a process of its own, and has to end as the
message says.
"""

from __future__ import annotations

import inspect

import pytest

from hepatch import probes
from hepatch.targets import TARGETS
from tests import forked
from tests.contracts.checks import CONTRACTS
from tests.contracts.contract import Contract, Then

# A release of before has nothing to take away: what the absence does is part of `test_contract_holds`.
DRIFTS = [(contract, kind) for contract in CONTRACTS if not contract.is_older() for kind in contract.drifts]
# The compiler takes seconds to load, which every child would pay.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._inductor.cudagraph_trees",
    "deepspeed",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "pydantic_settings",
    "wrapt",
    "tests.contracts.checks",
)
# Probes that use only what its owner documents.
PUBLIC = {"addresses", "autocast_dtype", "has_triton", "is_capturing", "kv_bytes_per_token"}


def named(value: Contract | str) -> str:
    return value.name if isinstance(value, Contract) else value


@pytest.fixture(scope="module")
def forks():
    with forked.Forks(PRELOAD) as started:
        yield started


@pytest.mark.parametrize("contract", CONTRACTS, ids=named)
def test_contract_holds(forks, contract):
    """It is there, is called as hepatch calls it, and means what hepatch takes it to mean.

    In a release of before it has to be absent, which is what its drift simulates, and hepatch has to do without it.
    """
    answer = forks.run("tests.contracts.checks:holds", contract.name)
    if contract.is_older():
        assert "error" in answer, f"{contract.name} is said to come with {contract.since}, and is there already"
        assert_outcome(contract, drifted(forks, contract, ""), contract.before or contract.then)
    else:
        assert "error" not in answer, contract.moved(answer) + "\n" + answer.get("traceback", "")


@pytest.mark.parametrize(("contract", "kind"), DRIFTS, ids=named)
def test_drift(forks, contract, kind):
    """Where it moves, hepatch does what the failure message of its contract says."""
    assert_outcome(contract, drifted(forks, contract, kind), contract.then)


def drifted(forks, contract, kind):
    answer = forks.run(
        "tests.contracts.checks:drifted",
        {"name": contract.name, "kind": kind},
        {"HEPATCH_COMPILE_BACKEND": contract.backend},
    )
    assert "result" in answer, f"{contract.name}, {kind or 'absent'}: {answer.get('traceback', answer)}"
    return answer["result"]


def assert_outcome(contract, outcome, then):
    """Assert that a life on a drifted host went as promised."""
    if then is Then.INACTIVE:
        assert outcome["on"] is False
        assert [state for state in outcome["states"].values() if state == "applied"] == []
        (line,) = (line for line in outcome["lines"] if line.startswith("hepatch"))
        assert contract.says in line
        return
    assert outcome["equal"] == [True, True, True], outcome
    native = then is Then.NATIVE and decodes_natively()
    assert outcome["path"] == ("fused" if native else "eager"), outcome
    if not native:
        # Without layered caches no call gets as far as most of what is relied on.
        reasons = {contract.says} if decodes_natively() else {contract.says, "[static-cache]"}
        assert any(reason in line for line in outcome["said"] for reason in reasons), outcome


def decodes_natively() -> bool:
    """Whether the installed transformers has what regions are built on."""
    from transformers import cache_utils

    return hasattr(cache_utils, "CacheLayerMixin")


def test_every_target_and_every_private_probe_has_a_contract():
    """What nobody watches is what drifts."""
    watched = {user for contract in CONTRACTS for user in contract.used_by}
    functions = {
        name
        for name, value in vars(probes).items()
        if inspect.isfunction(inspect.unwrap(value)) and value.__module__ == probes.__name__ and name[0] != "_"
    }

    assert {target.attribute for target in TARGETS} - watched == set()
    assert functions - watched - PUBLIC == set()


def test_every_contract_is_tried_or_says_why_not():
    """A promise that no test has seen kept is none."""
    assert [contract.name for contract in CONTRACTS if bool(contract.drifts) == bool(contract.untried)] == []
    assert len({contract.name for contract in CONTRACTS}) == len(CONTRACTS)
