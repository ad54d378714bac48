"""What earlier releases of transformers do otherwise, tried on the installed one; the releases are in `matrix`."""

from __future__ import annotations

import inspect

import pytest
import torch

import hepatch
from hepatch import attachments, decode, probes
from tests import engines
from tests.agreement import Actor

NEW_TOKENS = 5


@pytest.fixture
def prepare_cache(monkeypatch):
    """Replace what prepares the KV cache of a generate, beneath hepatch."""
    from transformers.generation.utils import GenerationMixin

    def replace(prepare):
        hepatch.disable()
        monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", prepare)
        hepatch.enable()

    yield replace
    # Before monkeypatch puts the original back, which must not bring a wrapper of hepatch's with it.
    hepatch.disable()


def keyword(model):
    return probes.cache_keyword(model)


class TestCache:
    def test_callers_empty_cache_is_filled_where_transformers_does_not_mark_it(self, prepare_cache):
        """As in 4.57: the caller's cache is left as it is, so nothing but its coming tells it from a prepared one."""
        from transformers import DynamicCache
        from transformers.generation.utils import GenerationMixin

        original = inspect.unwrap(vars(GenerationMixin)["_prepare_cache_for_generation"])

        def prepare(self, generation_config, model_kwargs, *args, **kwargs):
            if model_kwargs.get(keyword(self)) is None:
                original(self, generation_config, model_kwargs, *args, **kwargs)

        prepare_cache(prepare)
        actor = Actor(engines.build_model("llama"))
        prompt = engines.prompts(2, 7, (3,))
        cache = DynamicCache()
        got = actor.generated(**prompt, max_new_tokens=NEW_TOKENS, **{keyword(actor.model): cache})

        assert got.tolist() == actor.expected(**prompt, max_new_tokens=NEW_TOKENS).tolist()
        assert int(cache.get_seq_length()) == 7 + NEW_TOKENS - 1
        assert "a KV cache of the caller's" in actor.report.last_call.reason
        actor.agree(**prompt, max_new_tokens=NEW_TOKENS)

    def test_dict_output_has_a_cache_where_none_was_prepared(self, prepare_cache):
        """As in 5.0, which leaves it to the model to make one."""
        prepare_cache(lambda self, generation_config, model_kwargs, *args, **kwargs: None)
        actor = Actor(engines.build_model("llama"))
        prompt = engines.prompts(2, 7, (3,))
        asked = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
        expected, got = actor.expected(**prompt, **asked), actor.generated(**prompt, **asked)
        actor.assert_fused(got.sequences)
        expected_cache, cache = expected[keyword(actor.model)], got[keyword(actor.model)]

        assert got.sequences.tolist() == expected.sequences.tolist()
        assert type(cache) is type(expected_cache)
        for ours, theirs in zip(cache.layers, expected_cache.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)


def test_recovery_after_the_result_was_built_has_an_empty_cache(monkeypatch):
    """The loop of 4.57 takes a cache with tokens for a turn that has been, and finds no new ones in the prompt."""
    actor = Actor(engines.build_model("llama"))
    prompt, lengths, finish = engines.prompts(2, 7, (3,)), [], decode.finish_eagerly

    def no_output(*_args, **_kwargs):
        raise AttributeError("no such output in this release")

    def watched(original, call, *args, **kwargs):
        lengths.append(int(call.cache.get_seq_length()))
        return finish(original, call, *args, **kwargs)

    monkeypatch.setattr(probes, "generate_output", no_output)
    monkeypatch.setattr(decode, "finish_eagerly", watched)
    asked = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    got = actor.generated(**prompt, **asked)

    assert got.sequences.tolist() == actor.expected(**prompt, **asked).sequences.tolist()
    assert lengths == [0]


def test_beam_search_of_an_engine_that_cannot_be_judged_goes_on(monkeypatch, caplog):
    """A fact that cannot be read costs a line and never the call."""
    actor = Actor(engines.build_model("qwen2"))
    prompt = engines.prompts(2, 5)

    def facts(*_args, **_kwargs):
        raise AttributeError("no such attribute in this release")

    monkeypatch.setattr(attachments.Attachment, "facts", facts)
    got = actor.generated(**prompt, max_new_tokens=3, num_beams=2)

    assert got.tolist() == actor.expected(**prompt, max_new_tokens=3, num_beams=2).tolist()
    assert "the call could not be read (AttributeError" in caplog.text


def test_configuration_without_parts_is_the_decoders():
    """As in 4.44, whose configurations have no `get_text_config`."""

    class Config:
        num_hidden_layers = 3

    class Model:
        config = Config()

    assert probes.text_config(Model) is Model.config
    assert probes.layer_count(Model) == 3


@pytest.mark.parametrize("name", ["logits_to_keep", "num_logits_to_keep"])
def test_both_names_of_the_last_logits_are_known(name):
    """The second is that of 4.48."""
    from hepatch.generate_call import HANDLED

    assert name in HANDLED
