"""The wrappers by themselves, where an engine would only be in the way; engines are in test_repairs.py."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch

import hepatch
from hepatch import activation, attachments, targets
from tests import engines


def test_every_target_says_why_and_is_there():
    """Each attribute has its reason and is applied on the installed pair; only an optional one may be missing there."""
    for target in targets.TARGETS:
        importlib.import_module(target.module)
    states = activation.patch_states()

    assert [target.name for target in targets.TARGETS] == list(states)
    assert {states[target.name] for target in targets.TARGETS if not target.optional} == {"applied"}
    assert all(
        states[target.name] == "applied" or f"{target.name} is missing" in states[target.name]
        for target in targets.TARGETS
    )
    assert all(target.why.endswith(".") for target in targets.TARGETS)


class TestConfig:
    @pytest.fixture
    def section_of(self):
        from deepspeed.runtime import config

        def read(section, **by_name):
            whole = {"train_batch_size": 1, "hybrid_engine": section}
            before = repr(whole)
            parsed = (
                config.get_hybrid_engine_config(param_dict=whole) if by_name else config.get_hybrid_engine_config(whole)
            )
            assert repr(whole) == before
            return parsed

        return read

    @pytest.mark.parametrize("key", ["enable_graph_capture", "enable_cuda_graph"])
    @pytest.mark.parametrize("value", [True, False])
    def test_both_keys_are_accepted(self, section_of, key, value):
        assert section_of({"enabled": True, key: value}).enabled is True
        assert section_of({"enabled": True, key: value}, by_name=True).enabled is True

    def test_key_that_deepspeed_knows_reaches_it(self, section_of):
        from deepspeed.runtime.config import HybridEngineConfig

        if "enable_cuda_graph" not in HybridEngineConfig.model_fields:
            pytest.skip("this DeepSpeed does not know the key")

        assert section_of({"enable_cuda_graph": True}).enable_cuda_graph is True

    def test_misspelt_key_is_for_deepspeed_to_refuse(self, section_of):
        with pytest.raises(ValueError, match="enable_graph_captures"):
            section_of({"enable_graph_captures": True})

    def test_value_that_is_no_boolean_is_refused_before_an_engine_exists(self, section_of):
        """DeepSpeed never sees the key, so nobody else would."""
        with pytest.raises(ValueError, match=r"hybrid_engine\.enable_graph_capture='perhaps'"):
            section_of({"enable_graph_capture": "perhaps"})

    def test_no_section(self):
        from deepspeed.runtime import config

        assert config.get_hybrid_engine_config({}).enabled is False


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((torch.ones(3, 2),), {}, 3),
        ((None,), {"inputs_embeds": torch.ones(4, 2, 8)}, 4),
        ((), {"input_ids": torch.ones(5, 2)}, 5),
        ((), {"attention_mask": torch.ones(6, 2)}, 6),
        ((), {"input_ids": [[1, 2]]}, 1),
        ((), {}, 1),
    ],
    ids=["position", "embeddings", "input_ids", "mask", "list", "nothing"],
)
def test_rows(args, kwargs, expected):
    """Whatever gives a batch counts."""
    assert targets._rows(args, kwargs) == expected


class TestAttachFails:
    @pytest.fixture
    def broken(self, monkeypatch):
        def attach(_):
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(attachments, "attach", attach)
        targets._said.forget()

    def test_engine_is_built_and_generates(self, broken, caplog):
        """A failure of ours costs the regions and one warning."""
        model = engines.build_model("qwen2")
        oracle = engines.oracle(model)
        with caplog.at_level(logging.WARNING, logger="hepatch"):
            engine = engines.build_engine(model)
            engine.eval()
        prompt = engines.prompts(2, 6)
        expected = oracle.generate(**prompt, max_new_tokens=3, do_sample=False)

        assert engine.generate(**prompt, max_new_tokens=3, do_sample=False).tolist() == expected.tolist()
        assert [record.message for record in caplog.records if record.name == "hepatch"] == [
            "hepatch: eager for Qwen2ForCausalLM [attach]: ZeroDivisionError: a bug. Please report this."
        ]

    def test_strict_raises(self, broken, monkeypatch):
        monkeypatch.setenv("HEPATCH_STRICT", "1")

        with pytest.raises(ZeroDivisionError):
            engines.build_engine(engines.build_model("qwen2"))


@pytest.fixture(scope="module")
def engine():
    return engines.build_engine(engines.build_model("qwen2"))


class TestGenerate:
    def test_generate_of_the_model_is_the_one_it_has_now(self, engine):
        """A library may set its own on the model after the engine was built."""
        engine.module.generate = lambda *args, **kwargs: ("another library's", args, kwargs)
        try:
            assert engine.generate("prompt", top_k=1) == ("another library's", ("prompt",), {"top_k": 1})
        finally:
            del engine.module.generate

    def test_generate_of_the_model_that_leads_back_to_the_engine(self, engine):
        """No endless recursion: the class has the original."""
        engine.module.generate = engine.generate
        try:
            engine.eval()
            ids = engines.prompts(2, 4)["input_ids"]
            assert engine.module.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 6)
        finally:
            del engine.module.generate

    def test_two_prompts_are_refused_as_transformers_does(self, engine):
        ids = engines.prompts(2, 4)["input_ids"]
        with pytest.raises((ValueError, TypeError)):
            engine.generate(inputs=ids, input_ids=ids, max_new_tokens=2)
        with pytest.raises(TypeError):
            engine.generate(ids, inputs=ids, max_new_tokens=2)

    def test_model_outside_of_any_engine_takes_the_original(self, engine):
        model = engines.build_model("qwen2")
        ids = engines.prompts(2, 4)["input_ids"]
        before = hepatch.report(engine).last_call
        model.generate(ids, max_new_tokens=2, do_sample=False)

        assert hepatch.report(engine).last_call is before
