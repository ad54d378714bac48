"""Several engines in one process: each has its own region, and none costs another its compilation."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import hepatch
from hepatch import attachments
from tests import engines
from tests.agreement import Actor

SHAPES = [
    ("llama", {}),
    ("llama", {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ("llama", {"num_hidden_layers": 1}),
    ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ("llama", {"vocab_size": 300}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"intermediate_size": 40}),
    ("llama", {"num_hidden_layers": 3}),
    ("opt", {}),
    ("opt", {"hidden_size": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2}),
    ("mistral", {"sliding_window": 5}),
]


def asked(actor, number):
    """A call of its own for each engine, within its vocabulary."""
    vocabulary = actor.model.config.vocab_size
    return {
        **engines.prompts(2 + number % 3, 5 + number, (2, 0), seed=number, vocabulary=vocabulary),
        "max_new_tokens": 8,
    }


def test_eleven_engines_of_different_shapes():
    """More engines than Dynamo's recompile limit, most of one class: each fused, right, and compiled once."""
    graphs = torch._dynamo.utils.counters["stats"]
    actors = [
        Actor(engines.build_model(family, **{"vocabulary": 512, **_named(more)}), stage=2 * (number % 2))
        for number, (family, more) in enumerate(SHAPES)
    ]
    for number, actor in enumerate(actors):
        actor.agree(**asked(actor, number))
    compiled = [actor.report.compilations for actor in actors]
    before = graphs["unique_graphs"]

    for number in reversed(range(len(actors))):
        actors[number].agree(**asked(actors[number], number + 1))

    assert before == graphs["unique_graphs"]
    assert compiled == [actor.report.compilations for actor in actors]
    assert all(count >= 1 for count in compiled)
    assert (
        len({id(attachments.of_model(actor.model)) for actor in actors})
        == len(SHAPES)
        > torch._dynamo.config.recompile_limit
    )


def _named(more):
    return {"vocabulary" if name == "vocab_size" else name: value for name, value in more.items()}


class TestTwoEngines:
    @pytest.fixture
    def pair(self):
        """Two engines of one architecture with different weights."""
        return Actor(engines.build_model("llama", seed=1)), Actor(engines.build_model("llama", seed=2))

    def test_calls_alternate(self, pair):
        """What one generates and trains does not reach the other."""
        for round_ in range(2):
            answers = [actor.agree(**asked(actor, round_)) for actor in pair]
            assert not torch.equal(*answers)

        pair[0].train()

        for actor in pair:
            actor.agree(**asked(actor, 3))

    def test_releasing_one_leaves_the_other(self, pair):
        """Release and reset are an engine's own."""
        for actor in pair:
            actor.agree(**asked(actor, 0))
        kept = pair[1].report

        hepatch.release(pair[0].engine)

        assert pair[0].report.cache_mib == 0
        assert pair[1].report.cache_mib == kept.cache_mib > 0
        for actor in pair:
            actor.agree(**asked(actor, 0))
        assert pair[1].report.compilations == kept.compilations

    def test_failure_of_one_leaves_the_other(self, pair, monkeypatch):
        """A region that fails refuses its own engine's calls only."""
        for actor in pair:
            actor.agree(**asked(actor, 0))
        region = attachments.of_model(pair[0].model).regions.any_region

        def explode(*_args):
            raise RuntimeError("of this engine alone")

        monkeypatch.setattr(region, "_step", explode)
        pair[0].generated(**asked(pair[0], 0))

        assert [refusal.rule for refusal in pair[0].report.refusals] == ["earlier-failure"]
        pair[1].agree(**asked(pair[1], 0))

    def test_an_engine_that_is_dropped_is_freed(self, pair):
        """Nothing of ours keeps a model alive once its engine is gone."""
        first, _ = pair
        first.agree(**asked(first, 0))
        attachment = weakref.ref(attachments.of_model(first.model))
        del first, pair

        # The fixture's own tuple holds the engines until the test ends; a fresh engine has no such holder.
        actor = Actor(engines.build_model("llama", seed=3))
        actor.agree(**asked(actor, 0))
        gone = weakref.ref(attachments.of_model(actor.model))
        buffers = [weakref.ref(parameter) for parameter in actor.model.parameters()]
        actor.engine.destroy()
        del actor
        torch._dynamo.reset()
        gc.collect()

        assert attachment() is not None
        assert gone() is None
        assert [buffer() for buffer in buffers if buffer() is not None] == []


def test_releasing_gives_memory_back_at_once():
    """Neither a cycle nor anything that the compiler keeps holds the KV cache, nor weights once the engine is gone."""
    actor = Actor(engines.build_model("llama", seed=4))
    actor.agree(**asked(actor, 0))
    cache = attachments.of_model(actor.model).kv
    held = [weakref.ref(buffer._flat) for layer in cache._layers for buffer in (layer.keys, layer.values)]
    del cache
    gc.collect()
    gc.disable()
    try:
        hepatch.release(actor.engine)
    finally:
        gc.enable()

    assert [each() for each in held] == [None] * len(held)

    actor.agree(**asked(actor, 0))
    weights = [weakref.ref(parameter) for parameter in actor.model.parameters()]
    actor.engine.destroy()
    del actor
    gc.collect()

    assert [each() for each in weights if each() is not None] == []


def test_deep_copy_is_an_ordinary_model():
    """A copy of a module that has generated answers with its own weights, is attached to nothing, and stays eager."""
    actor = Actor(engines.build_model("llama"), lr=0.05)
    first = actor.agree(**asked(actor, 0))

    frozen = copy.deepcopy(actor.model)
    actor.train()
    second = actor.agree(**asked(actor, 0))
    with torch.no_grad():
        answer = frozen.generate(**asked(actor, 0), do_sample=False, pad_token_id=engines.PAD)

    assert attachments.of_model(frozen) is None
    assert torch.equal(first, answer)
    assert not torch.equal(first, second)
