"""A region that fails at any step: the same call ends with transformers' own result, and says what happened."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref

import pytest
import torch

import hepatch
from hepatch import attachments, decode, region
from hepatch.backends import native
from hepatch.errors import FailedError
from tests import engines
from tests.agreement import Actor, assert_same_tokens

NEW = 12
ENDS = (1, 4, 8)
LAST = NEW - 2  # the region's steps are counted from 0, and the prompt gives the first token


class InjectedError(RuntimeError):
    """What the tests let a step raise."""


@pytest.fixture
def fail(monkeypatch):
    """Let a step of every region built from now on raise: by number, before it has done its work or after."""
    real = region._compile

    def fail(step, when="before", error=InjectedError):
        counted = itertools.count()

        def compile_and_fail(function, backend):
            compiled = real(function, backend)

            def call(*args, **kwargs):
                at_fault = next(counted) == step
                if at_fault and when == "before":
                    raise error("injected here")
                compiled(*args, **kwargs)
                if at_fault and when == "after":
                    raise error("injected here")

            return call

        monkeypatch.setattr(region, "_compile", compile_and_fail)

    return fail


@pytest.fixture(scope="module")
def model():
    """One shallow model for all, since each test compiles it anew; three rows of it end at three steps."""
    return engines.build_model("opt", num_hidden_layers=1)


@pytest.fixture
def actor(model):
    """A fresh engine, because a failure is remembered."""
    return Actor(engines.oracle(model))


@pytest.fixture(scope="module")
def prompt(model):
    """Three rows of different lengths that say no token early which another row says at its end."""
    for seed in range(100):
        prompt = engines.prompts(3, 8, (2, 0, 5), seed=seed)
        with torch.no_grad():
            answer = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[:, 8:]
        if stops_at(answer, ENDS) == list(ENDS):
            return prompt
    raise AssertionError("no prompt ends its rows at these steps")


def ends_at(answer, steps):
    """The tokens that rows 0, 1, ... of an answer hold at these steps."""
    return [answer[row, step].item() for row, step in enumerate(steps)]


def stops_at(answer, steps):
    """At which step each row first meets one of these tokens."""
    ends = ends_at(answer, steps)
    return [next(step for step, token in enumerate([*row.tolist(), ends[0]]) if token in ends) for row in answer]


def ends_of(actor, prompt, steps=None):
    """Ends of sequence that rows 0, 1, ... meet at these steps; without steps, each at its own, the last at step 8."""
    return ends_at(actor.expected(**prompt, max_new_tokens=NEW)[:, 8:], steps or ENDS)


def assert_recovered(actor, new_tokens=None):
    """The latest call failed inside and went on eagerly."""
    report = actor.report
    assert report.recoveries == 1
    assert len(report.failures) == 1
    assert "injected here" in report.failures[0]
    assert "InjectedError" in report.failures[0]
    if new_tokens is not None:
        assert report.last_call.new_tokens == new_tokens


def assert_streamed_alike(actor, asked):
    """The oracle's tokens come back, and a streamer sees what the oracle's streamer sees."""
    theirs, ours = engines.Streamed(), engines.Streamed()

    expected = actor.expected(**asked, streamer=theirs)
    got = actor.generated(**asked, streamer=ours)

    assert_same_tokens(expected, got)
    assert theirs.shown == ours.shown
    assert theirs.ended == ours.ended == 1


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (0, "after"), (1, "before"), (7, "after"), (LAST, "before")])
def test_tokens_are_right_wherever_it_fails(actor, fail, prompt, step, when):
    """The call that fails loses no token, computes none from a wrong cache, and names the failure."""
    fail(step, when)

    got = actor.generated(**prompt, max_new_tokens=NEW)

    assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
    assert_recovered(actor, new_tokens=NEW)


@pytest.mark.parametrize(
    ("step", "when"),
    [(0, "before"), (1, "after"), (2, "before"), (4, "after"), (6, "before"), (7, "after"), (9, "before")],
)
def test_rows_that_have_finished_stay_finished(actor, fail, prompt, step, when):
    """Rows that met their end before the failure are padded from there, in the result and for a streamer."""
    asked = {**prompt, "max_new_tokens": NEW, "eos_token_id": ends_of(actor, prompt)}
    fail(step, when)

    assert_streamed_alike(actor, asked)
    # A step behind the last end may run before the stop flags are read, and its failure costs nothing.
    if step < max(ENDS):
        assert_recovered(actor)


@pytest.mark.parametrize("step", [3, 8, 9])
def test_flags_that_were_not_read_yet(actor, fail, prompt, step):
    """Without a streamer flags lag, so a failure may come after the last row's end, which the result does not show."""
    asked = {**prompt, "max_new_tokens": NEW, "eos_token_id": ends_of(actor, prompt)}
    fail(step, "after")

    got = actor.generated(**asked)

    assert_same_tokens(actor.expected(**asked), got)


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (4, "after"), (LAST, "before"), (LAST, "after")])
def test_streamer_sees_each_token_once(actor, fail, prompt, step, when):
    """The prompt once, every column once and in order, and one end, in a call that goes on to its length."""
    asked = {**prompt, "max_new_tokens": NEW}
    fail(step, when)

    assert_streamed_alike(actor, asked)


@pytest.mark.parametrize("step", [0, 3])
def test_minimum_of_new_tokens_is_counted_from_the_prompt(actor, fail, prompt, step):
    """The minimum neither starts again at the failure nor is forgotten."""
    ends = ends_of(actor, prompt, (0, 2, 5))
    asked = {**prompt, "max_new_tokens": NEW, "min_new_tokens": 5, "eos_token_id": ends}
    fail(step)

    got = actor.generated(**asked)

    assert_same_tokens(actor.expected(**asked), got)
    assert_recovered(actor)


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (3, "after"), (LAST, "before")])
def test_dict_output_is_joined(actor, fail, prompt, step, when):
    """Sequences, and scores and logits of every step, those of the region and those of the recovery."""
    ends = ends_of(actor, prompt, (0, 4, 8))
    asked = {**prompt, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": ends}
    asked |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    fail(step, when)

    expected, got = actor.expected(**asked), actor.generated(**asked)

    assert type(expected) is type(got)
    assert_same_tokens(expected.sequences, got.sequences)
    for name in ("scores", "logits"):
        theirs, ours = getattr(expected, name), getattr(got, name)
        assert len(theirs) == len(ours) == NEW
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert expected.cache.get_seq_length() == got.cache.get_seq_length()
    assert_recovered(actor)


def test_sampling_goes_on(actor, fail, prompt):
    """A sampled call recovers too; with one candidate left its tokens can be compared."""
    asked = {**prompt, "max_new_tokens": NEW, "do_sample": True, "top_k": 1}
    fail(4)

    got = actor.generated(**asked)

    assert_same_tokens(actor.expected(**asked), got)
    assert_recovered(actor)


def test_one_row(actor, fail):
    """A batch of one, which a region pads to two, comes back as one."""
    prompt = engines.prompts(1, 7, seed=2)
    fail(3)

    got = actor.generated(**prompt, max_new_tokens=NEW)

    assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
    assert_recovered(actor)


def test_prompt_that_fails(actor, prompt, monkeypatch):
    """A prefill that fails ends on the original path from the first token on."""

    def prefill(*_args, **_kwargs):
        raise InjectedError("injected here")

    actor.agree(**prompt, max_new_tokens=2)
    monkeypatch.setattr(native.NativeForward, "prefill", prefill)

    got = actor.generated(**prompt, max_new_tokens=NEW)

    assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
    assert_recovered(actor)
    assert actor.report.last_call.eager_steps == NEW


class TestAfterwards:
    def test_first_compilation_is_not_tried_again_before_reset(self, actor, fail, prompt, monkeypatch):
        """A step that never worked leaves the engine eager, by a rule that names the failure, until it is reset."""
        asked = {**prompt, "max_new_tokens": NEW}
        with monkeypatch.context():
            fail(0)
            actor.generated(**asked)

        for _ in range(attachments.RETRY_AFTER_CALLS + 2):
            got = actor.generated(**asked)
            assert actor.report.last_call.path == "eager"
        report = actor.report

        assert_same_tokens(actor.expected(**asked), got)
        assert "[earlier-failure]" in report.last_call.reason
        assert "injected here" in report.last_call.reason
        assert [refusal.rule for refusal in report.refusals] == ["earlier-failure"]
        assert "hepatch.reset" in report.refusals[0].remedy
        assert (report.active, report.backend) == (False, "none")

        hepatch.reset(actor.engine)
        actor.agree(**asked)
        assert actor.report.refusals == ()

    def test_step_that_had_worked_is_tried_again_by_itself(self, actor, fail, prompt):
        """A failure after success costs some eager calls; then a region is tried again, and works."""
        asked = {**prompt, "max_new_tokens": NEW}
        fail(5)
        actor.generated(**asked)
        expected = actor.expected(**asked)

        for _ in range(attachments.RETRY_AFTER_CALLS):
            assert_same_tokens(expected, actor.generated(**asked))
            assert actor.report.last_call.path == "eager"

        actor.agree(**asked)
        assert actor.report.recoveries == 1

    def test_it_is_not_tried_for_ever(self, actor, fail, prompt, monkeypatch):
        """A region that keeps failing is given up for good, so that no run compiles again and again."""
        monkeypatch.setattr(attachments, "RETRY_AFTER_CALLS", 2)
        asked = {**prompt, "max_new_tokens": NEW}
        expected = actor.expected(**asked)
        for _ in range(attachments.MOST_RETRIES + 1):
            fail(5)
            assert_same_tokens(expected, actor.generated(**asked))
            for _ in range(attachments.RETRY_AFTER_CALLS):
                actor.generated(**asked)

        actor.generated(**asked)

        assert actor.report.last_call.path == "eager"
        assert len(actor.report.failures) == attachments.MOST_RETRIES + 1

    def test_memory_is_given_back(self, actor, fail, prompt):
        """What the failed region held is freed at once."""
        fail(5)

        actor.generated(**prompt, max_new_tokens=NEW)

        assert actor.report.cache_mib == 0

    def test_it_is_logged_once(self, actor, fail, prompt, caplog):
        """One warning for the failure and one for the calls that follow, whatever their number."""
        fail(0)
        with caplog.at_level(logging.WARNING, logger="hepatch"):
            for _ in range(4):
                actor.generated(**prompt, max_new_tokens=NEW)

        lines = [record.getMessage() for record in caplog.records if record.name == "hepatch"]
        assert len(lines) == 2, lines
        assert all("injected here" in line and "OPTForCausalLM" in line for line in lines)
        assert all("\n" not in line for line in lines)


def test_interrupt_is_the_users(actor, fail, prompt):
    """Ctrl-C is not recovered from: it leaves generate, and the next call is right."""
    fail(4, error=KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        actor.generated(**prompt, max_new_tokens=NEW)

    actor.agree(**prompt, max_new_tokens=NEW)


def test_interrupt_between_two_states_of_the_model(actor, prompt):
    """Ctrl-C may hit while a step puts layers, attention and hooks back: they are back all the same, for good."""
    asked = {**prompt, "max_new_tokens": 3}
    expected = actor.agree(**asked)
    layers = [module for module in actor.model.modules() if "Layer" in type(module).__name__]
    tables = [module._forward_pre_hooks for module in actor.model.modules()]
    hooks = [dict(table) for table in tables]
    implementation = actor.model.config._attn_implementation
    watched = {"opaque", "put_back", "chosen", "held", "emptied", "in_use"}
    reached = 0

    def interrupt(frame, event, _):
        nonlocal reached
        if frame.f_code.co_name not in watched or not frame.f_globals["__name__"].startswith("hepatch"):
            return None
        if event == "line":
            reached += 1
            if reached == at:
                raise KeyboardInterrupt
        return interrupt

    def ends(tracer):
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            actor.generated(**asked)
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(before)
        return True

    at = 1
    while not ends(interrupt):
        assert not any("forward" in layer.__dict__ for layer in layers), at
        assert hooks == [dict(table) for table in tables], at
        assert implementation == actor.model.config._attn_implementation, at
        assert torch.equal(expected, actor.generated(**asked)), at
        assert actor.report.last_call.path == "fused", at
        at, reached = at + 1, 0

    assert at > len(watched)


def test_strict_raises(model, fail, prompt, monkeypatch):
    """HEPATCH_STRICT=1 turns the recovery into an error that carries its cause."""
    monkeypatch.setenv("HEPATCH_STRICT", "1")
    actor = Actor(engines.oracle(model))
    fail(4)

    with pytest.raises(FailedError, match="OPTForCausalLM") as caught:
        actor.generated(**prompt, max_new_tokens=NEW)

    assert isinstance(caught.value.__cause__, InjectedError)
    hepatch.reset(actor.engine)
    actor.agree(**prompt, max_new_tokens=NEW)


class TestSkippedGraphs:
    """A step that is not compiled or not recorded runs slowly and rightly; that is a failure with a name."""

    def test_step_that_was_never_compiled(self, actor, prompt):
        """Dynamo switched off: the tokens are right and the report says that nothing was compiled."""
        with torch._dynamo.config.patch(disable=True):
            got = actor.generated(**prompt, max_new_tokens=NEW)

        assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
        assert len(actor.report.failures) == 1
        assert "compile" in actor.report.failures[0]

    def test_graph_that_was_never_recorded(self, actor, prompt):
        """A region that should have recorded by its second visit and has not: here because there is no CUDA."""
        actor.agree(**prompt, max_new_tokens=1 + 1)
        region = attachments.of_model(actor.model).regions.any_region
        region._graphed = True
        region._known.clear()

        got = actor.generated(**prompt, max_new_tokens=NEW)

        assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
        assert actor.report.recordings == 0
        assert "GraphsSkipped" in actor.report.failures[0]
        assert "no CUDA graph" in actor.report.failures[0]


@pytest.mark.parametrize("where", ["prompt", "step"])
def test_memory_is_free_before_the_call_goes_on(actor, fail, prompt, monkeypatch, where):
    """Out of memory: neither the cache nor what the failed forward has computed is held while transformers goes on."""
    held = []

    def exhausted(*args, **kwargs):
        activations = torch.zeros(64, 64)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("injected here")

    if where == "step":
        fail(3, "before", torch.OutOfMemoryError)
    else:
        actor.generated(**prompt, max_new_tokens=NEW)
        monkeypatch.setattr(native, "last_logits", exhausted)
    finish = decode.finish_eagerly

    def watched(*args):
        kept.append([each() for each in held])
        return finish(*args)

    kept = []
    prefill = native.NativeForward.prefill

    def noted(forward, kv, prompt):
        try:
            return prefill(forward, kv, prompt)
        finally:
            held.extend(weakref.ref(buffer._flat) for layer in kv._layers for buffer in (layer.keys, layer.values))

    def explode():
        raise InjectedError

    monkeypatch.setattr(native.NativeForward, "prefill", noted)
    monkeypatch.setattr(decode, "finish_eagerly", watched)
    gc.disable()
    try:
        explode()
    except InjectedError as error:
        # While the caller handles an error, which has nothing to do with ours.
        got = actor.generated(**prompt, max_new_tokens=NEW)
        whole = error.__traceback__ is not None
    finally:
        gc.enable()

    assert whole
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=NEW), got)
    assert len(kept[0]) >= 2
    assert kept[0] == [None] * len(kept[0])
