"""Every way to call generate that a region serves, and what comes back besides tokens, on two architectures."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from hepatch import decode, sampling
from hepatch.readback import Readback
from tests import engines
from tests.agreement import Actor, assert_same_tokens

NEW = 12


@pytest.fixture(scope="module", params=["opt", "gemma2"])
def actor(request):
    """An engine with the cheap backend that all tests of the module share."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        actor = Actor(engines.build_model(request.param))
        yield actor
        actor.let_go()


@pytest.fixture(autouse=True)
def clean_hepatch():
    """Replace the suite's own: the engine lives as long as the module."""


def new_tokens(actor, prompt, count=NEW):
    """The oracle's new tokens `[batch, count]`, for choosing ends of sequence."""
    return actor.expected(**prompt, max_new_tokens=count)[:, prompt["input_ids"].shape[1] :]


def test_minimum_of_new_tokens(actor):
    """An end of sequence is not taken before the minimum, in the prompt's own step as in later ones."""
    prompt = engines.prompts(3, 6, (0, 3, 1), seed=8)
    free = new_tokens(actor, prompt)
    ends = [free[0, 0].item(), free[1, 2].item(), free[2, 4].item()]

    got = actor.agree(**prompt, max_new_tokens=NEW, min_new_tokens=6, eos_token_id=ends)
    without = actor.agree(**prompt, max_new_tokens=NEW, eos_token_id=ends)

    assert not torch.isin(got[:, 6:12], torch.tensor([*ends, engines.PAD])).any()
    assert got.shape != without.shape or not torch.equal(got, without)


@pytest.mark.parametrize("pads", [(2, 0, 5), ()])
def test_repetition_penalty(actor, pads):
    """The penalty counts each row's prompt without its padding, and the tokens that the region chose."""
    prompt = engines.prompts(3, 8, pads, seed=22)

    got = actor.agree(**prompt, max_new_tokens=NEW, repetition_penalty=4.0)
    mild = actor.agree(**prompt, max_new_tokens=NEW, repetition_penalty=1.01)

    assert not torch.equal(got, mild)


def test_every_form_of_the_arguments(actor):
    """Positional, `inputs=`, `input_ids=`, a GenerationConfig, `max_length`, and both of the engine's entries."""
    prompt = engines.prompts(3, 8, (2, 0, 5), seed=9)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    want = actor.expected(**prompt, max_new_tokens=NEW)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=engines.PAD)
    plain = {"attention_mask": mask, "do_sample": False, "pad_token_id": engines.PAD}
    forms = {
        "positional": lambda generate: generate(ids, **plain, max_new_tokens=NEW),
        "inputs": lambda generate: generate(inputs=ids, **plain, max_new_tokens=NEW),
        "input_ids": lambda generate: generate(input_ids=ids, **plain, max_new_tokens=NEW),
        "generation_config": lambda generate: generate(ids, generation_config=config, attention_mask=mask),
        "positional config": lambda generate: generate(ids, config, attention_mask=mask),
        "max_length": lambda generate: generate(ids, **plain, max_length=8 + NEW),
    }

    for name, call in forms.items():
        for generate in (actor.model.generate, actor.engine.generate):
            with torch.no_grad():
                got = call(generate)
            assert torch.equal(want, got), name
            actor.assert_fused(got)


def test_without_an_attention_mask(actor):
    """No mask and no padding in the prompt."""
    actor.agree(engines.prompts(2, 7, seed=10)["input_ids"], max_new_tokens=NEW)


def test_several_return_sequences(actor):
    """Rows are expanded before the loop; with one candidate left, sampling is greedy and can be compared."""
    prompt = engines.prompts(2, 8, (3, 0), seed=11)

    got = actor.agree(**prompt, max_new_tokens=NEW, do_sample=True, top_k=1, num_return_sequences=3)

    assert got.shape == (6, 8 + NEW)


def test_dict_output(actor):
    """Sequences, scores and logits of a dict output are those of transformers, and the caller's to keep."""
    prompt = engines.prompts(3, 8, (2, 0, 5), seed=12)
    free = new_tokens(actor, prompt)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    arguments = {**prompt, **wanted, "max_new_tokens": NEW, "eos_token_id": free[0, 3].item(), "min_new_tokens": 2}

    expected = actor.expected(**arguments)
    got = actor.generated(**arguments)
    kept = got.scores[-1].clone(), got.sequences.clone()
    actor.generated(**{**arguments, "input_ids": prompt["input_ids"].flip(1)})

    assert type(expected) is type(got)
    assert_same_tokens(expected.sequences, got.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            # Both sum in float32, over a window of another length.
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert torch.equal(kept[0], got.scores[-1])
    assert torch.equal(kept[1], got.sequences)


def test_returned_cache(actor):
    """The cache of a dict output is of transformers' own kind, and a generate goes on from it as from transformers'."""
    prompt = engines.prompts(3, 8, (2, 0, 5), seed=14)
    asked = {**prompt, "return_dict_in_generate": True, "max_new_tokens": NEW}

    expected, got = actor.expected(**asked), actor.generated(**asked)
    last = actor.report.last_call
    kept = [layer.keys.clone() for layer in got.cache.layers]
    actor.generated(**engines.prompts(3, 8, seed=15), max_new_tokens=NEW)

    assert last.path == "fused"
    assert type(expected.cache) is type(got.cache)
    assert expected.cache.get_seq_length() == got.cache.get_seq_length() == 8 + NEW - 1
    for theirs, ours, before in zip(expected.cache.layers, got.cache.layers, kept, strict=True):
        assert type(theirs) is type(ours)
        assert theirs.keys.shape == ours.keys.shape
        assert torch.equal(before, ours.keys), "a later call must not write the caller's cache"
    more = {"attention_mask": torch.cat([prompt["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], 1)}
    ends = [
        generate(sequences.sequences, **more, cache=sequences.cache, max_new_tokens=4)
        for generate, sequences in ((actor.expected, expected), (actor.generated, got))
    ]
    assert_same_tokens(*ends)
    assert "KV cache of the caller's" in actor.report.last_call.reason


@pytest.mark.parametrize("early", [False, True])
def test_streamer(actor, early):
    """A streamer is shown what transformers shows it: the prompt, each token once and in order, and the end."""
    prompt = engines.prompts(1, 8, seed=16)
    free = new_tokens(actor, prompt)
    ends = {"eos_token_id": free[0, 9].item()} if early else {}
    theirs, ours = engines.Streamed(), engines.Streamed()

    expected = actor.expected(**prompt, max_new_tokens=NEW, streamer=theirs, **ends)
    got = actor.generated(**prompt, max_new_tokens=NEW, streamer=ours, **ends)

    assert_same_tokens(expected, got)
    assert theirs.shown == ours.shown
    assert ours.ended == 1
    assert actor.report.last_call.path == "fused"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 3}, None),
        ({"use_cache": False}, "use_cache=False"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"logits_to_keep": 1}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_calls_are_transformers_own(actor, arguments, reason):
    """What is no plain decode gives transformers' result and a reason in the report; the next call is fused again."""
    prompt = engines.prompts(2, 6, (2, 0), seed=17)

    expected = actor.expected(**prompt, max_new_tokens=6, **arguments)
    got = actor.generated(**prompt, max_new_tokens=6, **arguments)
    last = actor.report.last_call

    assert_same_tokens(getattr(expected, "sequences", expected), getattr(got, "sequences", got))
    if reason is not None:
        assert last.path == "eager"
        assert reason in last.reason
    actor.agree(**prompt, max_new_tokens=6)


def test_hidden_states_once(monkeypatch):
    """A call that asks for hidden states gets them, and what transformers installs for it refuses no later call."""
    monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", "eager")
    actor = Actor(engines.build_model("llama"))
    prompt = {**engines.prompts(2, 6, (2, 0), seed=17), "max_new_tokens": 6}
    asked = {**prompt, "output_hidden_states": True, "return_dict_in_generate": True}
    first = actor.agree(**prompt)

    expected, got = actor.expected(**asked), actor.generated(**asked)
    reason = actor.report.last_call.reason

    assert_same_tokens(expected.sequences, got.sequences)
    assert len(expected.hidden_states) == len(got.hidden_states)
    assert "output_hidden_states" in reason
    assert torch.equal(first, actor.agree(**prompt))
    actor.agree(**engines.prompts(2, 6, seed=18), max_new_tokens=6, do_sample=True, top_k=1)
    actor.let_go()


def test_custom_processor_and_criterion_are_obeyed(actor):
    """A caller's own processor or criterion runs, in Python, at every step."""
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.tensor([banned]), float("-inf"))

    class Enough(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 11)

    prompt = engines.prompts(2, 6, (2, 0), seed=18)
    banned = new_tokens(actor, prompt)[0, 2].item()
    for arguments in (
        {"logits_processor": LogitsProcessorList([Ban()])},
        {"stopping_criteria": StoppingCriteriaList([Enough()])},
    ):
        expected = actor.expected(**prompt, max_new_tokens=NEW, **arguments)
        got = actor.generated(**prompt, max_new_tokens=NEW, **arguments)

        assert_same_tokens(expected, got)
        assert not torch.equal(got, actor.agree(**prompt, max_new_tokens=NEW))


def test_default_device_is_the_callers(actor):
    """Nothing of a call is made where `torch.set_default_device` points; on "meta" nothing could be read back."""
    prompt = engines.prompts(2, 6, (2, 0), seed=18)
    end = new_tokens(actor, prompt)[0, 3].item()
    asked = {**prompt, "max_new_tokens": NEW, "eos_token_id": [end, end + 1]}
    call = actor.agree(**asked)
    readback = Readback

    def elsewhere(*args, **kwargs):
        with torch.device("meta"):
            return readback(*args, **kwargs)

    load = sampling.load_ids

    def load_elsewhere(*args):
        with torch.device("meta"):
            load(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "Readback", elsewhere)
        patched.setattr(sampling, "load_ids", load_elsewhere)
        assert torch.equal(call, actor.agree(**asked))


def test_result_is_the_callers(actor):
    """Later calls do not change what earlier ones returned, and the caller may write into it."""
    prompt = engines.prompts(3, 8, (2, 0, 5), seed=19)

    first = actor.generated(**prompt, max_new_tokens=NEW)
    copy = first.clone()
    actor.generated(**engines.prompts(3, 8, seed=20), max_new_tokens=NEW)
    assert torch.equal(copy, first)

    first.zero_()
    assert torch.equal(copy, actor.agree(**prompt, max_new_tokens=NEW))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode(actor, mode):
    """Any of torch's modes gives the same tokens from the region, and nothing is compiled again for it."""
    prompt = engines.prompts(2, 6, (2, 0), seed=21)
    want = actor.agree(**prompt, max_new_tokens=NEW)
    compilations = actor.report.compilations

    with mode():
        got = actor.model.generate(**prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=engines.PAD)

    assert torch.equal(want, got)
    assert actor.report.last_call.path == "fused"
    assert compilations == actor.report.compilations
    assert not got.is_inference()
