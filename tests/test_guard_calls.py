"""The rules tripped by real engines and real calls: transformers' result, the rule in the report, the region again."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import hepatch
from hepatch.errors import RefusedError
from tests import engines
from tests.agreement import Actor, assert_same_tokens

PROMPT = {**engines.prompts(3, 8, (2, 0, 5)), "max_new_tokens": 6}


def shallow(**more):
    """A model that is cheap to build and to compile."""
    return engines.build_model("llama", **{"num_hidden_layers": 1, **more})


def assert_refused(actor, rule, **more):
    """A call is transformers' own, and the rule stands in the report and in the call's reason."""
    assert_same_tokens(actor.expected(**PROMPT, **more), actor.generated(**PROMPT, **more))
    report = actor.report
    assert report.last_call.path == "eager"
    assert f"[{rule}]" in report.last_call.reason
    assert report.last_call.new_tokens == 6
    return report


class TestEngine:
    """Rules that hold for an engine's whole life."""

    @pytest.mark.parametrize(
        ("rule", "arguments"),
        [
            ("zero3", {"stage": 3}),
            ("released-cache", {"hybrid": {"release_inference_cache": True}}),
            ("disabled", {"hybrid": {"enable_graph_capture": False}}),
            ("disabled", {"hybrid": {"enable_cuda_graph": False}}),
        ],
    )
    def test_configuration_that_refuses(self, caplog, rule, arguments):
        """Decided at construction, said once, and generate works by both entries."""
        with caplog.at_level(logging.WARNING, logger="hepatch"):
            actor = Actor(shallow(), **arguments)
            for _ in range(3):
                report = assert_refused(actor, rule)
        with torch.no_grad():
            by_engine = actor.engine.generate(**PROMPT, do_sample=False, pad_token_id=engines.PAD)

        assert_same_tokens(actor.expected(**PROMPT), by_engine)
        assert [refusal.rule for refusal in report.refusals] == [rule]
        assert (report.active, report.backend, report.compilations) == (False, "none", 0)
        lines = [line for line in caplog.messages if line.startswith("hepatch: eager for")]
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"hepatch: eager for LlamaForCausalLM [{rule}]: ")

    @pytest.mark.parametrize("key", ["enable_graph_capture", "enable_cuda_graph"])
    def test_configuration_that_asks(self, key):
        """A key that asks for graphs refuses nothing."""
        Actor(shallow(), hybrid={key: True}).agree(**PROMPT)

    def test_backend_that_this_release_lacks(self, monkeypatch):
        """HEPATCH_BACKEND=kernels is refused by name, not ignored."""
        monkeypatch.setenv("HEPATCH_BACKEND", "kernels")

        assert_refused(Actor(shallow()), "backend")

    def test_several_rules_at_once(self, monkeypatch):
        """All that fail are reported, in the call's reason and in the report."""
        monkeypatch.setenv("HEPATCH_BACKEND", "kernels")

        report = assert_refused(Actor(shallow(), stage=3), "zero3")

        assert [refusal.rule for refusal in report.refusals] == ["backend", "zero3"]
        assert "[backend]" in report.last_call.reason

    def test_no_compiler(self, monkeypatch, tmp_path):
        """Without a C++ compiler on the path Inductor is not even tried."""
        monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", "inductor")
        actor = Actor(shallow())
        monkeypatch.setenv("PATH", str(tmp_path))

        with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
            assert_refused(actor, "no-compiler")


class TestCall:
    """Rules that hold for one call, or until something changes."""

    def test_users_hook_is_called_and_refuses_while_it_is_there(self):
        """A forward hook runs at every token; once removed the region is back."""
        actor = Actor(shallow())
        actor.agree(**PROMPT)
        widths = []
        handle = actor.model.model.layers[0].mlp.register_forward_hook(
            lambda _, args, __: widths.append(args[0].shape[1])
        )

        report = assert_refused(actor, "hooks")
        handle.remove()

        assert widths == [8, 1, 1, 1, 1, 1]
        assert "model.layers.0.mlp" in report.last_call.reason
        actor.agree(**PROMPT)

    def test_another_thread(self):
        """A call from a thread that did not compile is eager and right; the first thread goes on in the region."""
        actor = Actor(shallow())
        actor.agree(**PROMPT)
        caught = []

        def call():
            try:
                assert_refused(actor, "thread")
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

        assert caught == []
        actor.agree(**PROMPT)

    def test_cache_budget(self, monkeypatch):
        """A call whose cache would not fit is refused with the numbers; a smaller one is served."""
        monkeypatch.setenv("HEPATCH_CACHE_MIB", "1")
        actor = Actor(engines.build_model("llama"))
        large = {**engines.prompts(24, 100), "max_new_tokens": 100}

        assert_same_tokens(actor.expected(**large), actor.generated(**large))
        reason = actor.report.last_call.reason

        assert "[cache-budget]" in reason
        assert "1 MiB" in reason
        actor.agree(**PROMPT)
        assert actor.report.cache_mib <= 1

    def test_length_is_the_models(self):
        """One position too many is refused, the last one is not."""
        actor = Actor(shallow(max_position_embeddings=16))
        prompt = engines.prompts(2, 8)

        actor.agree(**prompt, max_new_tokens=8)
        got = actor.generated(**prompt, max_new_tokens=9)

        assert_same_tokens(actor.expected(**prompt, max_new_tokens=9), got)
        assert "[length]" in actor.report.last_call.reason

    def test_disable_and_enable_on_a_live_engine(self):
        """Off, the call is transformers' own and the cache is gone; on again, the region is back."""
        actor = Actor(shallow())
        actor.agree(**PROMPT)

        hepatch.disable()
        got = actor.generated(**PROMPT)
        report = actor.report
        hepatch.enable()

        assert_same_tokens(actor.expected(**PROMPT), got)
        assert [refusal.rule for refusal in report.refusals] == ["disabled"]
        assert report.cache_mib == 0
        actor.agree(**PROMPT)

    def test_strict_raises_instead(self, monkeypatch):
        """HEPATCH_STRICT=1: a refused call is an error with the rule, reason and remedy in it."""
        monkeypatch.setenv("HEPATCH_STRICT", "1")
        actor = Actor(shallow())

        with pytest.raises(RefusedError, match=r"LlamaForCausalLM \[decode-mode\]: .*use_cache=False"):
            actor.generated(**PROMPT, use_cache=False)
        actor.agree(**PROMPT)

    def test_weights_that_are_elsewhere(self, monkeypatch):
        """While weights are not on the engine's device no region runs; here it is the device that moves."""
        actor = Actor(shallow(), stage=2)
        actor.agree(**PROMPT)

        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(actor.engine, "device", torch.device("meta"))
            assert_refused(actor, "weights-offloaded")

        actor.agree(**PROMPT)

    def test_weights_that_went_and_came_back(self):
        """DeepSpeed's own offload and reload between two generates changes no token."""
        actor = Actor(shallow(), stage=2)
        first = actor.agree(**PROMPT)

        actor.engine.offload_states(pin_memory=False)
        actor.engine.reload_states()

        assert torch.equal(first, actor.agree(**PROMPT))
