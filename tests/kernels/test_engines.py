"""What engines share: class counters, one counter of the position, one workspace."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hepatch
from hepatch import kernel_probes
from hepatch.backends import ownership
from tests import engines
from tests.agreement import assert_same_tokens
from tests.kernels import families

REFUSED = {
    "llama_grouped": "do not run LlamaForCausalLM",
    "gpt_neox": "no container for the layers of GPTNeoXForCausalLM",
    "gptj": "do not run GPTJForCausalLM",
    "gpt_neo": "do not run GPTNeoForCausalLM",
    "bloom": "BLOOM inference with DeepSpeed is no longer supported",
    "gpt2": "cannot be built",
}


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_is_admitted_and_right_or_refused_and_whole(build: Any, family: str) -> None:
    """Whatever DeepSpeed would do to it, the weights are as they were, and tokens are right."""
    before = {name: value.clone() for name, value in families.build(family).state_dict().items()}
    generator = torch.get_rng_state()
    actor = build(family, expect="none" if family in REFUSED else "kernels")

    if family in REFUSED:
        reasons = [refusal.reason for refusal in actor.report.refusals if refusal.rule == "static-cache"]
        assert REFUSED[family] in reasons[0]
        assert actor.engine._inference_containers == []
    for name, value in actor.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(generator, torch.get_rng_state())
    prompt = engines.prompts(2, 7, (2,))
    got = actor.engine.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=engines.PAD)
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=8), got)


def test_two_engines(build: Any) -> None:
    """One of them has the containers, both are right, in turns."""
    first = build("opt")
    second = build("opt", expect="none", seed=1)

    assert "another engine of this process" in second.report.refusals[0].reason
    for seed in range(3):
        prompt = engines.prompts(2, 6 + seed, (2,), seed=seed)
        first.agree(**prompt, max_new_tokens=9)
        expected = second.expected(**prompt, max_new_tokens=9)
        assert_same_tokens(expected, second.generated(**prompt, max_new_tokens=9))


def test_the_next_engine_has_them_when_the_first_is_gone() -> None:
    first = engines.build_engine(families.build("opt"))
    assert hepatch.report(first).backend == "kernels"
    del first
    gc.collect()
    assert ownership._owner is not None

    second = engines.build_engine(families.build("opt", seed=1))
    try:
        assert hepatch.report(second).backend == "kernels"
        assert kernel_probes.class_state().layers == 2
    finally:
        ownership._owner = None
        kernel_probes.set_class_state(kernel_probes.fresh_class_state())


@pytest.mark.parametrize("by", ["release", "context"])
def test_a_workspace_released_by_hand_is_made_again(build: Any, by: str) -> None:
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    actor.agree(**prompt, max_new_tokens=6)

    actor.engine.workspace.release_workspace()
    if by == "context":
        actor.engine.workspace.retake_workspace()

    actor.agree(**prompt, max_new_tokens=9)
    assert actor.report.recoveries == 0


def test_a_shared_prefill_of_deepspeeds_rollout(build: Any) -> None:
    """It makes the workspace for its own rows, fewer or more than before: where keys are stored changes with them."""
    rollout = pytest.importorskip("deepspeed.runtime.rollout.hybrid_engine_rollout")
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

    actor = build()
    tokenizer = SimpleNamespace(pad_token_id=engines.PAD, eos_token_id=3)
    shared = rollout.HybridEngineRollout(
        actor.engine, tokenizer, rollout.HybridEngineRolloutConfig(use_shared_prefill=True)
    )
    asked = SamplingConfig(max_new_tokens=6, temperature=0.0, n_samples_per_prompt=2)
    for before in (8, 2):
        actor.agree(**engines.prompts(before, 12, (2,)), max_new_tokens=6)
        prompt = engines.prompts(2, 12, (2,), seed=before)

        got = shared.generate(RolloutRequest(prompt["input_ids"], prompt["attention_mask"]), asked).input_ids

        twice = {name: value.repeat_interleave(2, 0) for name, value in prompt.items()}
        assert_same_tokens(actor.expected(**twice, max_new_tokens=6), got)
        actor.agree(**engines.prompts(8, 12, (2,)), max_new_tokens=6)
    assert actor.report.failures == ()


def test_no_memory_for_a_larger_batch(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do not look whether their allocation succeeded: it is refused before, and the layers serve."""
    actor = build()
    actor.agree(**engines.prompts(2, 6), max_new_tokens=4)
    held = hepatch.attachments.of_model(actor.model).backend
    monkeypatch.setattr(held, "_no_room", lambda rows: "DeepSpeed's workspace needs 9 MiB" if rows > 2 else None)
    prompt = engines.prompts(5, 6, (2,))

    got = actor.generated(**prompt, max_new_tokens=6)

    assert_same_tokens(actor.expected(**prompt, max_new_tokens=6), got)
    assert "needs 9 MiB" in actor.report.last_call.reason
    actor.agree(**engines.prompts(2, 6), max_new_tokens=4)


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("no compiler")])
def test_a_policy_that_raises_or_exits_costs_the_containers_alone(
    build: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(DeepSpeedHybridEngine, "new_inference_container", fails)

    actor = build("opt", expect="none")

    assert type(error).__name__ in actor.report.refusals[0].reason
    prompt = engines.prompts(2, 6)
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=6), actor.generated(**prompt, max_new_tokens=6))


@pytest.mark.parametrize("backend", ["native", "kernels"])
def test_the_backend_that_was_asked_for(build: Any, monkeypatch: pytest.MonkeyPatch, backend: str, caplog: Any) -> None:
    monkeypatch.setenv("HEPATCH_BACKEND", backend)
    with caplog.at_level(logging.WARNING, "hepatch"):
        actor = build("opt", expect="none" if backend == "native" else "kernels")
        prompt = engines.prompts(2, 6)
        assert_same_tokens(actor.expected(**prompt, max_new_tokens=6), actor.generated(**prompt, max_new_tokens=6))

    assert actor.report.last_call.path == ("eager" if backend == "native" else "fused")


def test_positions_beyond_the_limit_run_outside_the_region(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound on recordings nothing is dropped and nothing is wrong."""
    monkeypatch.setenv("HEPATCH_MAX_POSITIONS", "5")
    actor = build()
    prompt = engines.prompts(2, 6, (2,))

    for _ in range(2):
        got = actor.generated(**prompt, max_new_tokens=12)
        assert_same_tokens(actor.expected(**prompt, max_new_tokens=12), got)
        last = actor.report.last_call
        assert (last.path, last.region_steps, last.eager_steps) == ("fused", 5, 7)
    assert actor.report.compilations == 1


def test_no_buffer_moves_while_the_workspace_stays(build: Any) -> None:
    """A buffer that moved would void the recordings of all positions on a GPU."""
    actor = build(hybrid={"max_out_tokens": 64})
    places = set()
    for rows, columns, new in ((4, 5, 3), (1, 20, 20), (3, 11, 29), (4, 30, 35), (2, 2, 60)):
        actor.generated(**engines.prompts(rows, columns), max_new_tokens=new)
        places.add(hepatch.attachments.of_model(actor.model).state.addresses)

    assert len(places) == 1


def test_release_and_reset(build: Any) -> None:
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    actor.agree(**prompt, max_new_tokens=6)
    hepatch.release(actor.engine)
    actor.agree(**prompt, max_new_tokens=6)
    hepatch.reset(actor.engine)
    actor.agree(**prompt, max_new_tokens=6)

    assert actor.report.backend == "kernels"
