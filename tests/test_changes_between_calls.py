"""What a program changes between two generates must act in the next one, and stay as the program left it."""

from __future__ import annotations

import pytest
import torch

import hepatch
from tests import engines

PROMPT = engines.prompts(3, 6, (2, 0, 1))
KEYWORDS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": engines.PAD}


class Pair:
    """An actor under hepatch and an untouched oracle, to which the same change is made."""

    def __init__(self, family="llama"):
        model = engines.build_model(family)
        self.oracle = engines.oracle(model)
        self.engine = engines.build_engine(model)
        self.engine.eval()
        self.model = model
        assert self.agree() == "fused"

    def agree(self):
        """The path of a call whose tokens are the oracle's."""
        expected = self.oracle.generate(**PROMPT, **KEYWORDS)

        assert torch.equal(expected, self.engine.generate(**PROMPT, **KEYWORDS))
        return hepatch.report(self.engine).last_call.path

    def differs(self, before):
        """Whether the oracle's tokens moved: a change that shows nothing proves nothing."""
        return not torch.equal(before, self.oracle.generate(**PROMPT, **KEYWORDS))


@pytest.fixture
def pair():
    return Pair()


def test_forward_of_a_layer_instance_acts_and_stays(pair):
    """An override set on a decoder layer is neither passed over nor taken away."""
    before = pair.oracle.generate(**PROMPT, **KEYWORDS)
    for model in (pair.model, pair.oracle):
        layer = model.model.layers[0]
        layer.forward = lambda *args, _layer=layer, **kwargs: type(_layer).forward(_layer, *args, **kwargs) * -1.3

    assert pair.differs(before)
    pair.agree()
    assert "forward" in pair.model.model.layers[0].__dict__


def test_forward_of_a_class_acts(pair, monkeypatch):
    """A class that is patched after the compilation, as kernel libraries do, is compiled anew."""
    before = pair.oracle.generate(**PROMPT, **KEYWORDS)
    kind = type(pair.model.model.layers[0].mlp)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: original(self, hidden) * -2.0)

    assert pair.differs(before)
    pair.agree()


def test_global_hooks_refuse(pair):
    """A hook on every module of the process would not be called by a compiled step."""
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert pair.agree() == "eager"
    finally:
        handle.remove()

    assert pair.agree() == "fused"


def test_weights_that_are_replaced_are_seen(pair):
    """New memory for a weight inside a layer has graphs recorded anew."""
    before = pair.oracle.generate(**PROMPT, **KEYWORDS)
    replaced = torch.nn.Parameter(pair.model.model.layers[1].mlp.down_proj.weight.detach() * -3.0)
    relocations = relocations_of(pair.engine)
    pair.model.model.layers[1].mlp.down_proj.weight = replaced
    pair.oracle.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(replaced.detach().clone())

    assert pair.differs(before)
    assert pair.agree() == "fused"
    assert relocations_of(pair.engine) > relocations


def test_every_value_of_a_number_in_a_layer_is_seen(pair):
    """A recording bakes numbers in: each new value is recorded, also when Dynamo has made the number an input."""
    for value in (5.0, 0.5, 2.0, 7.0):
        relocations = relocations_of(pair.engine)
        for model in (pair.model, pair.oracle):
            model.model.layers[0].input_layernorm.variance_epsilon = value

        assert pair.agree() == "fused"
        assert relocations_of(pair.engine) > relocations


def test_equal_calls_record_nothing_anew(pair):
    """The control of the two tests above."""
    pair.agree()
    relocations = relocations_of(pair.engine)
    for _ in range(3):
        pair.agree()

    assert relocations == relocations_of(pair.engine)


def test_a_relocated_buffer_never_comes_back_to_an_address():
    """A graph that was recorded for an earlier address must not be replayed."""
    from hepatch.static_buffer import StaticBuffer

    buffer = StaticBuffer(torch.long, torch.device("cpu"), unique=True)
    seen = []
    for elements in range(64, 84):
        buffer.reserve(elements)
        seen.append(buffer.face(8, 8, dynamic=()).data_ptr())
        buffer.relocate()
        seen.append(buffer.face(8, 8, dynamic=()).data_ptr())

    assert len(seen) == len(set(seen))


def test_faces_are_bounded(pair, monkeypatch):
    """Ever new batch sizes and lengths do not fill the host's memory, and what is made again serves as before."""
    from hepatch import attachments, static_buffer

    monkeypatch.setattr(static_buffer, "MOST_FACES", 3)
    for rows in (2, 3, 4, 5, 6, 2, 3):
        prompt = engines.prompts(rows, 6, (2, 0))
        expected = pair.oracle.generate(**prompt, **KEYWORDS)
        assert torch.equal(expected, pair.engine.generate(**prompt, **KEYWORDS))
        assert hepatch.report(pair.engine).last_call.path == "fused"

    memory = attachments.of_engine(pair.engine).state._memory
    assert all(len(buffer._faces) <= 3 for buffer in memory.values())
    assert hepatch.report(pair.engine).compilations == 1


def test_dtype_of_the_model_may_change(pair):
    """Another dtype is a new model, not a failure."""
    pair.model.double()
    pair.oracle.double()

    assert pair.agree() == "fused"
    assert hepatch.report(pair.engine).failures == ()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_vocabulary_of_the_model_may_change(family):
    """More tokens are a new model as well, also where the embedding stays the same module."""
    pair = Pair(family)
    sampled = {**PROMPT, **KEYWORDS, "do_sample": True, "top_k": 1}
    pair.engine.generate(**sampled)
    pair.model.resize_token_embeddings(engines.VOCABULARY + 8, mean_resizing=False)
    pair.oracle.resize_token_embeddings(engines.VOCABULARY + 8, mean_resizing=False)
    pair.oracle.load_state_dict(pair.model.state_dict())

    assert torch.equal(pair.oracle.generate(**sampled), pair.engine.generate(**sampled))
    assert hepatch.report(pair.engine).last_call.path == "fused"
    assert pair.agree() == "fused"


def test_what_the_callers_streamer_raises_is_the_callers(pair):
    """A streamer that stops a generate stops it, and costs the engine nothing."""

    class StopError(Exception):
        pass

    class Streamer:
        def __init__(self):
            self.puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 4:
                raise StopError

        def end(self):
            pass

    with pytest.raises(StopError):
        pair.engine.generate(**PROMPT, **KEYWORDS, streamer=Streamer())

    assert pair.agree() == "fused"
    assert hepatch.report(pair.engine).failures == ()


@pytest.mark.parametrize("scores", [False, True])
def test_failure_behind_the_last_step_adds_no_token(pair, monkeypatch, scores):
    """Building the result may run out of memory; the call still returns as many tokens and scores as were asked for."""
    from hepatch import decode

    wanted = {**KEYWORDS, "return_dict_in_generate": True, "output_scores": scores}
    expected = pair.oracle.generate(**PROMPT, **wanted)

    def fail(*args):
        raise RuntimeError("no room for the cache")

    monkeypatch.setattr(decode._Run, "_returned_cache", fail)
    found = pair.engine.generate(**PROMPT, **wanted)

    assert torch.equal(expected.sequences, found.sequences)
    assert (not scores and found.scores is None) or len(expected.scores) == len(found.scores)
    assert hepatch.report(pair.engine).recoveries == 1


def relocations_of(engine):
    """How often this engine's graphs had to be recorded anew."""
    from hepatch import attachments

    return attachments.of_engine(engine).state.relocations


def test_result_is_whole_whatever_faces_were_current(pair, monkeypatch):
    """Looking at an earlier key at the end of a call turns the faces; the result is read whole all the same."""
    from hepatch.region import Region

    monkeypatch.setenv("HEPATCH_BUCKET_TOKENS", "16")
    hepatch.reset(pair.engine)
    settle = Region.settle

    def settle_at_the_first_key(region):
        region._host_key = min(region.visits)
        settle(region)

    monkeypatch.setattr(Region, "settle", settle_at_the_first_key)
    wanted = {**KEYWORDS, "max_new_tokens": 40}
    expected = pair.oracle.generate(**PROMPT, **wanted)

    assert torch.equal(expected, pair.engine.generate(**PROMPT, **wanted))
    assert hepatch.report(pair.engine).last_call.path == "fused"
