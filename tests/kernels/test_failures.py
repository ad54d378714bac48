"""A failure at any step, or inside any container: the same call ends with the right tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hepatch import attachments
from hepatch.errors import FailedError
from tests import engines
from tests.agreement import assert_same_tokens

NEW, COLUMNS = 9, 6
STEPS = range(NEW - 1)


class InjectedError(RuntimeError):
    """What the tests let a container raise."""


def break_container(actor: Any, monkeypatch: pytest.MonkeyPatch, layer: int, step: int, *, for_good: bool) -> None:
    """Lets a container raise at a decode step, counted from the next prompt on; once, or from then on."""
    module = attachments.of_model(actor.model).backend.stack.modules[layer]
    real, counted = module.forward, itertools.count(-1)

    def forward(*args: Any, **kwargs: Any) -> Any:
        at = next(counted)
        if at == step or (for_good and at > step):
            raise InjectedError("injected here")
        return real(*args, **kwargs)

    monkeypatch.setitem(module.__dict__, "forward", forward)
    stack = attachments.of_model(actor.model).backend.stack
    calls = [(own, forward if call == real else call) for own, call in stack._prompt_calls]
    monkeypatch.setattr(stack, "_prompt_calls", calls)


@pytest.fixture
def prompt() -> dict[str, torch.Tensor]:
    return engines.prompts(3, COLUMNS, (2, 0, 3))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("step", [-1, *STEPS])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_at_every_step_and_in_every_container(
    build: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any, layer: int, step: int, for_good: bool
) -> None:
    actor = build()
    ends = actor.expected(**prompt, max_new_tokens=NEW)[:, COLUMNS:]
    asked = {**prompt, "max_new_tokens": NEW, "eos_token_id": [int(ends[0, 2]), int(ends[1, 6])]}
    theirs, ours = engines.Streamed(), engines.Streamed()
    break_container(actor, monkeypatch, layer, step, for_good=for_good)

    got = actor.generated(**asked)

    assert_same_tokens(actor.expected(**asked), got)
    steps = actor.report.last_call.region_steps if actor.report.recoveries == 0 else None
    if steps is None:
        assert "InjectedError" in actor.report.failures[0]
    else:
        # Every row had ended before the container was to fail.
        assert step >= got.shape[1] - COLUMNS - 1
    one = {name: value[:1] for name, value in prompt.items()}
    expected = actor.expected(**one, max_new_tokens=NEW, streamer=theirs)
    assert_same_tokens(expected, actor.generated(**one, max_new_tokens=NEW, streamer=ours))
    assert theirs.shown == ours.shown
    assert theirs.ended == ours.ended == 1


@pytest.mark.parametrize("step", [0, 3, NEW - 2])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_streamed_and_scored(
    build: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any, step: int, for_good: bool
) -> None:
    """What was shown is not shown again, and scores are whole, whether containers or layers end the call."""
    actor = build()
    asked = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    one = {name: value[:1] for name, value in prompt.items()}
    theirs, ours = engines.Streamed(), engines.Streamed()
    expected = actor.expected(**one, **asked, streamer=theirs)
    break_container(actor, monkeypatch, 1, step, for_good=for_good)

    got = actor.generated(**one, **asked, streamer=ours)

    assert actor.report.recoveries == 1
    assert_same_tokens(expected.sequences, got.sequences)
    assert theirs.shown == ours.shown
    assert theirs.ended == ours.ended == 1
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == NEW
        torch.testing.assert_close(torch.stack(getattr(got, name)), torch.stack(getattr(expected, name)))


@pytest.mark.parametrize("step", [0, 4])
def test_sampled_tokens_that_were_made_stay(
    build: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any, step: int
) -> None:
    """The draws of a region are its own: what it has shown must come out again after a failure."""
    actor = build()
    one = {name: value[:1] for name, value in prompt.items()}
    shown = engines.Streamed()
    break_container(actor, monkeypatch, 0, step, for_good=False)

    got = actor.generated(**one, max_new_tokens=NEW, do_sample=True, top_k=20, pad_token_id=engines.PAD, streamer=shown)

    assert actor.report.recoveries == 1
    assert [token for [token] in shown.shown[1:]] == got[0, COLUMNS:].tolist()


def test_a_moved_counter_is_never_used(build: Any, prompt: Any) -> None:
    """The counter of the kernels is moved by hand between two steps."""
    actor = build()
    actor.agree(**prompt, max_new_tokens=4)
    attachment = attachments.of_model(actor.model)
    ledger, real = attachment.backend.stack.ledger, attachment.backend.stack.ledger.begin

    def begin(tokens: int, *, replay: bool) -> None:
        real(tokens, replay=replay)
        if tokens == COLUMNS + 4:
            attachment.backend.stack._counter.put(tokens + 3)

    ledger.begin = begin
    try:
        got = actor.generated(**prompt, max_new_tokens=NEW)
    finally:
        del ledger.begin

    assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
    assert "LedgerError" in actor.report.failures[0]


def test_strict_raises(build: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> None:
    monkeypatch.setenv("HEPATCH_STRICT", "1")
    actor = build()
    break_container(actor, monkeypatch, 1, 3, for_good=False)

    with pytest.raises(FailedError, match="a decode step failed"):
        actor.generated(**prompt, max_new_tokens=NEW)
