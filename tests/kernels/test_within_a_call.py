"""What a streamer does with the engine in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hepatch
from hepatch import attachments
from tests import engines
from tests.agreement import assert_same_tokens
from tests.kernels import families
from tests.kernels.test_failures import break_container
from tests.kernels.test_weights import adapted

NEW = 10


class Acting(engines.Streamed):
    """A streamer that does something once, after three tokens."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._act = act

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.shown) == 4:
            self._act()


def agree_while(actor: Any, act: Callable[[], Any], **asked: Any) -> None:
    """Both generate the same and show the same, whatever is done in the middle."""
    quiet, acting = engines.Streamed(), Acting(act)
    asked = {**engines.prompts(1, 6), "max_new_tokens": NEW, **asked}
    expected = actor.expected(**asked, streamer=quiet)
    got = actor.generated(**asked, streamer=acting)
    assert_same_tokens(expected, got)
    assert acting.shown == quiet.shown


@pytest.mark.parametrize("by", ["model", "engine"])
@pytest.mark.parametrize(("rows", "columns", "new"), [(1, 6, 2), (2, 9, 7)])
def test_another_generate(build: Any, by: str, rows: int, columns: int, new: int) -> None:
    """The buffers hold one call at a time, so the one within runs the layers."""
    actor = build()
    prompt = engines.prompts(rows, columns, seed=5)
    generate = actor.model.generate if by == "model" else actor.engine.generate
    within = []

    def act() -> None:
        within.append(generate(**prompt, max_new_tokens=new, do_sample=False, pad_token_id=engines.PAD))
        assert "another generate" in actor.report.last_call.reason

    agree_while(actor, act)

    assert actor.report.last_call.path == "fused"
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=new), within[0])
    actor.agree(**prompt, max_new_tokens=new)


@pytest.mark.parametrize("by", ["model", "engine"])
@pytest.mark.parametrize("outer", ["model", "engine"])
def test_another_generate_with_adapters(build: Any, monkeypatch: pytest.MonkeyPatch, by: str, outer: str) -> None:
    """However often the adapters are fused at that moment, the layers find them beside the weights."""
    monkeypatch.setitem(families.FAMILIES, "adapted", adapted)
    actor = build("adapted")
    before = {name: value.clone() for name, value in actor.model.state_dict().items()}
    prompt = engines.prompts(2, 9, seed=5)
    expected = actor.expected(**prompt, max_new_tokens=6)
    of = {"model": actor.model.generate, "engine": actor.engine.generate}
    plain = {"do_sample": False, "pad_token_id": engines.PAD}

    def act() -> None:
        assert_same_tokens(expected, of[by](**prompt, max_new_tokens=6, **plain))

    one = engines.prompts(1, 6)
    with torch.no_grad():
        got = of[outer](**one, max_new_tokens=NEW, **plain, streamer=Acting(act))

    assert_same_tokens(actor.expected(**one, max_new_tokens=NEW), got)
    assert actor.report.last_call.path == "fused"
    for name, value in actor.model.state_dict().items():
        torch.testing.assert_close(value, before[name])


@pytest.mark.parametrize("act", ["release", "reset", "disable"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_engine_is_released(build: Any, act: str, sampled: bool) -> None:
    """The call in progress keeps what it works on and ends in the region; nothing has failed."""
    actor = build()
    acts = {
        "release": lambda: hepatch.release(actor.engine),
        "reset": lambda: hepatch.reset(actor.engine),
        "disable": hepatch.disable,
    }
    try:
        if sampled:
            shown = Acting(acts[act])
            asked = {**engines.prompts(1, 6), "max_new_tokens": NEW, "do_sample": True, "pad_token_id": engines.PAD}
            got = actor.generated(**asked, streamer=shown)
            assert [token for [token] in shown.shown[1:]] == got[0, 6:].tolist()
        else:
            agree_while(actor, acts[act])
    finally:
        hepatch.enable()

    assert actor.report.failures == ()
    actor.agree(**engines.prompts(1, 6), max_new_tokens=NEW)


@pytest.mark.parametrize("act", ["forward", "generate", "report"])
def test_after_a_failure(build: Any, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """Where containers start a call again outside the region, the streamer still finds the model's own layers."""
    actor = build()
    stack = attachments.of_model(actor.model).backend.stack
    ids = engines.prompts(2, 9, seed=5)
    break_container(actor, monkeypatch, 1, 1, for_good=False)

    def do() -> None:
        assert not any("forward" in layer.__dict__ for layer in stack.layers)
        if act == "forward":
            with torch.no_grad():
                assert torch.equal(actor.model(**ids).logits, actor.oracle(**ids).logits)
        elif act == "generate":
            got = actor.generated(**ids, max_new_tokens=4)
            assert_same_tokens(actor.expected(**ids, max_new_tokens=4), got)
        else:
            hepatch.report(actor.engine)
            actor.engine.eval()

    agree_while(actor, do)

    assert "InjectedError" in actor.report.failures[0]
    assert actor.report.recoveries == 1


def test_threads_take_turns(build: Any) -> None:
    """In the middle of a step or a prompt the modules are not the model's own, whoever calls them."""
    actor = build()
    prompts = [engines.prompts(2, 6 + index, (1,), seed=index) for index in range(4)]
    expected = [actor.expected(**prompt, max_new_tokens=20) for prompt in prompts]
    wrong: list[int] = []

    def generate(first: int) -> None:
        for turn in range(12):
            at = (first + turn) % len(prompts)
            got = actor.generated(**prompts[at], max_new_tokens=20)
            if not torch.equal(got, expected[at]):
                wrong.append(at)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(generate, first) for first in range(2)]:
            done.result()

    assert not wrong
    assert actor.report.failures == ()


@pytest.mark.parametrize("path", ["fused", "eager"])
def test_a_streamer_waits_for_another_thread(build: Any, path: str) -> None:
    actor = build()
    prompt = engines.prompts(2, 9, seed=5)
    expected = actor.expected(**prompt, max_new_tokens=6)

    with ThreadPoolExecutor(1) as thread:

        def act() -> None:
            got = thread.submit(actor.generated, **prompt, max_new_tokens=6).result(timeout=60)
            assert_same_tokens(expected, got)

        agree_while(actor, act, use_cache=path == "fused")

    assert actor.report.last_call.path == path
