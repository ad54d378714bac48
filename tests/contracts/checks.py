"""What the children of `test_contracts` run: real hosts are loaded, and hepatch is not."""

from __future__ import annotations

import sys
from typing import Any

from tests.contracts import of_deepspeed, of_torch, of_transformers, scenario
from tests.contracts.contract import Then

CONTRACTS = (*of_deepspeed.CONTRACTS, *of_transformers.CONTRACTS, *of_torch.CONTRACTS)


def holds(name: str) -> None:
    """Raise where a contract does not hold."""
    assert "hepatch" not in sys.modules
    _contract(name).holds()


def drifted(case: dict[str, str]) -> dict[str, Any]:
    """Move the host as a drift says, or not at all, and let hepatch meet it."""
    assert "hepatch" not in sys.modules
    contract = _contract(case["name"])
    drift = contract.drifts[case["kind"]] if case["kind"] else lambda: None
    return scenario.patching(drift) if contract.then is Then.INACTIVE else scenario.rollout(drift)


def _contract(name: str) -> Any:
    (found,) = (contract for contract in CONTRACTS if contract.name == name)
    return found
