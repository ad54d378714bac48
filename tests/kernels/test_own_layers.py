"""Everything but a plain rollout runs the model's own layers on an engine that has containers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hepatch
from tests import engines
from tests.agreement import assert_same_tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
    ids=["beams", "no cache", "attentions"],
)
def test_what_containers_cannot_do(build: Any, arguments: dict[str, Any], words: str) -> None:
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    actor.agree(**prompt, max_new_tokens=4)

    expected = actor.expected(**prompt, max_new_tokens=8, **arguments)
    got = actor.generated(**prompt, max_new_tokens=8, **arguments)

    if isinstance(expected, torch.Tensor):
        assert_same_tokens(expected, got)
    else:
        assert_same_tokens(expected.sequences, got.sequences)
        torch.testing.assert_close(got.attentions[0][0], expected.attentions[0][0])
    assert actor.report.last_call.path == "eager"
    assert words in actor.report.last_call.reason
    actor.agree(**prompt, max_new_tokens=8)


def test_a_prompt_of_one_token(build: Any) -> None:
    actor = build()
    for _ in range(2):
        prompt = engines.prompts(2, 1)
        expected = actor.expected(**prompt, max_new_tokens=6)
        assert_same_tokens(expected, actor.generated(**prompt, max_new_tokens=6))
        assert "a prompt of one token" in actor.report.last_call.reason
        actor.agree(**engines.prompts(2, 5), max_new_tokens=6)


def test_longer_than_the_workspace(build: Any) -> None:
    """Up to the last position in the region, one further by the layers, and the engine is as good as before."""
    actor = build(hybrid={"max_out_tokens": 24})
    prompt = engines.prompts(2, 8)
    actor.agree(**prompt, max_new_tokens=17)

    expected = actor.expected(**prompt, max_new_tokens=18)
    got = actor.generated(**prompt, max_new_tokens=18)

    assert_same_tokens(expected, got)
    assert "24 positions" in actor.report.last_call.reason
    actor.agree(**prompt, max_new_tokens=17)


def test_log_probs_between_two_generates(build: Any) -> None:
    """A forward in eval mode is the layers' own, bit for bit, and disturbs nothing."""
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    answer = actor.agree(**prompt, max_new_tokens=10)
    mask = (answer != engines.PAD).long()

    with torch.no_grad():
        got = actor.model(input_ids=answer, attention_mask=mask).logits
        expected = actor.oracle(input_ids=answer, attention_mask=mask).logits

    assert torch.equal(got, expected)
    actor.agree(**prompt, max_new_tokens=10)


@pytest.mark.parametrize("mode", ["eval", "module.train"])
def test_gradients(build: Any, mode: str) -> None:
    """Stock leaves its containers in after `module.train()`, and the blocks get no gradients at all."""
    actor = build()
    actor.agree(**engines.prompts(2, 6), max_new_tokens=4)
    ids = engines.prompts(2, 10, seed=4)["input_ids"]
    if mode == "module.train":
        actor.model.train()
        actor.oracle.train()
    gradients = []
    for model in (actor.model, actor.oracle):
        model.zero_grad()
        torch.manual_seed(0)
        # use_cache=False: with a cache transformers' attention goes another way, whatever the mode.
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})

    ours, theirs = gradients
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient)
        assert gradient.abs().sum() > 0


def test_a_deep_copy_is_an_ordinary_model_of_its_own(build: Any) -> None:
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    expected = actor.agree(**prompt, max_new_tokens=8)

    twin = copy.deepcopy(actor.model)

    with torch.no_grad():
        assert_same_tokens(expected, twin.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=1))
        for parameter in twin.parameters():
            parameter.zero_()
    actor.agree(**prompt, max_new_tokens=8)


def test_a_forward_within_a_sequence_is_noticed(build: Any) -> None:
    """A streamer that runs the containers themselves moves their counter: the call starts again and is right."""
    actor = build()
    prompt = engines.prompts(1, 6)
    actor.agree(**prompt, max_new_tokens=4)
    stack = hepatch.attachments.of_model(actor.model).backend.stack
    ids = engines.prompts(1, 9, seed=5)["input_ids"]

    class Meddler(engines.Streamed):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.shown) == 4:
                with torch.no_grad(), stack.in_force():
                    actor.model(input_ids=ids)

    meddler, quiet = Meddler(), engines.Streamed()

    expected = actor.expected(**prompt, max_new_tokens=10, streamer=quiet)
    got = actor.generated(**prompt, max_new_tokens=10, streamer=meddler)

    assert_same_tokens(expected, got)
    assert meddler.shown == quiet.shown
    assert "LedgerError" in actor.report.failures[0]


def test_another_forward_within_a_sequence_disturbs_nothing(build: Any) -> None:
    """A streamer that runs the model, as a reward would: its layers, so the sequence goes on in the region."""
    actor = build()
    prompt = engines.prompts(1, 6)
    ids = engines.prompts(1, 9, seed=5)["input_ids"]

    class Rewarded(engines.Streamed):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            with torch.no_grad():
                actor.model(input_ids=ids)

    expected = actor.expected(**prompt, max_new_tokens=10)

    assert_same_tokens(expected, actor.generated(**prompt, max_new_tokens=10, streamer=Rewarded()))
    assert actor.report.last_call.path == "fused"


def test_switched_off_before_the_first_generate(build: Any) -> None:
    """The workspace that hepatch would have made is stock's to make then."""
    actor = build()
    module = actor.engine._inference_containers[0].module
    prompt = engines.prompts(5, 6, (2,))

    hepatch.disable()
    actor.engine.eval()
    assert not module.workspace.is_allocated()
    with torch.no_grad():
        got = actor.engine.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=engines.PAD)
    assert module.workspace.is_allocated()
    hepatch.enable()

    assert "forward" not in actor.engine._orig_modules[0].__dict__
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=8), got)
    for rows in (2, 7):
        actor.agree(**engines.prompts(rows, 12, (2,)), max_new_tokens=8)


def test_positions_of_the_callers(build: Any) -> None:
    """transformers leaves such positions as they are at each step, and the kernels count for themselves."""
    actor = build("llama")
    prompt = engines.prompts(2, 6, (2,))
    positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp_min(0) + 3

    expected = actor.expected(**prompt, position_ids=positions, max_new_tokens=8)
    got = actor.generated(**prompt, position_ids=positions, max_new_tokens=8)

    assert_same_tokens(expected, got)
    assert "position_ids" in actor.report.last_call.reason


def test_switched_off_the_engine_is_stocks(build: Any) -> None:
    """`disable` gives back what the engine was built with: containers in eval mode, layers in train mode."""
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    expected = actor.agree(**prompt, max_new_tokens=8)

    hepatch.disable()
    actor.engine.eval()
    layer = actor.engine._orig_modules[0]
    assert layer.forward == actor.engine._inference_containers[0].module.forward
    hepatch.enable()
    actor.engine.eval()

    assert "forward" not in layer.__dict__
    assert_same_tokens(expected, actor.agree(**prompt, max_new_tokens=8))
