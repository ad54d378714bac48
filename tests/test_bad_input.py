"""Input that makes no sense ends as it does in transformers, and the engine is none the worse for it."""

from __future__ import annotations

import pytest
import torch

import hepatch
from tests import engines
from tests.agreement import Actor, outcome

NEW = 6
LONGEST = 32


@pytest.fixture(scope="module", params=["opt", "llama"])
def actor(request):
    """An engine with few positions, shared: learned ones, which end, and rotary ones, which do not."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        actor = Actor(engines.build_model(request.param, max_position_embeddings=LONGEST))
        yield actor
        actor.let_go()


@pytest.fixture(autouse=True)
def clean_hepatch():
    """Replace the suite's own: the engine lives as long as the module."""


@pytest.fixture(autouse=True)
def healthy(actor):
    """Let the failure of one test not be the failure of all that follow."""
    yield
    if actor.report.refusals:
        hepatch.reset(actor.engine)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


IDS = engines.prompts(2, 6)["input_ids"]
PADDED = engines.prompts(2, 6, (2, 0))
LONG = engines.prompts(2, LONGEST + 8)

BAD = {
    "empty batch": {"input_ids": IDS[:0], "attention_mask": ones(0, 6), "max_new_tokens": NEW},
    "no batch dimension": {"input_ids": IDS[0], "max_new_tokens": NEW},
    "prompt without columns": {"input_ids": IDS[:, :0], "max_new_tokens": NEW},
    "floating ids": {"input_ids": IDS.float(), "max_new_tokens": NEW},
    "ids out of the vocabulary": {"input_ids": IDS + engines.VOCABULARY, "max_new_tokens": NEW},
    "negative ids": {"input_ids": -IDS, "max_new_tokens": NEW},
    "prompt longer than the model": {**LONG, "max_new_tokens": NEW},
    "new tokens beyond the model": {**PADDED, "max_new_tokens": LONGEST},
    "last position of the model": {**PADDED, "max_new_tokens": LONGEST - 6},
    "one beyond the last position": {**PADDED, "max_new_tokens": LONGEST - 5},
    "no new tokens": {**PADDED, "max_new_tokens": 0},
    "negative new tokens": {**PADDED, "max_new_tokens": -1},
    "max_length within the prompt": {**PADDED, "max_length": 3},
    "max_length of the prompt": {**PADDED, "max_length": 6},
    "mask too short": {"input_ids": IDS, "attention_mask": ones(2, 5), "max_new_tokens": NEW},
    "mask too long": {"input_ids": IDS, "attention_mask": ones(2, 7), "max_new_tokens": NEW},
    "mask of another batch": {"input_ids": IDS, "attention_mask": ones(3, 6), "max_new_tokens": NEW},
    "mask of one row": {"input_ids": IDS, "attention_mask": ones(1, 6), "max_new_tokens": NEW},
    "mask of three dimensions": {"input_ids": IDS, "attention_mask": ones(2, 6, 6), "max_new_tokens": NEW},
    "mask of four dimensions": {"input_ids": IDS, "attention_mask": ones(2, 1, 6, 6).tril(), "max_new_tokens": NEW},
    "mask of booleans": {"input_ids": IDS, "attention_mask": PADDED["attention_mask"].bool(), "max_new_tokens": NEW},
    "mask of floats": {"input_ids": IDS, "attention_mask": PADDED["attention_mask"].float(), "max_new_tokens": NEW},
    "mask of zeros": {"input_ids": IDS, "attention_mask": 0 * ones(2, 6), "max_new_tokens": NEW},
    "one row of zeros in the mask": {"input_ids": IDS, "attention_mask": ones(2, 6) * ones(2, 1).cumsum(0).sub(1)},
    "padding on the right": {
        "input_ids": IDS,
        "attention_mask": PADDED["attention_mask"].flip(1),
        "max_new_tokens": NEW,
    },
    "a hole in the mask": {"input_ids": IDS, "attention_mask": ones(2, 6).index_fill(1, torch.tensor(3), 0)},
    "pad is the end and no mask": {"input_ids": PADDED["input_ids"], "pad_token_id": 1, "eos_token_id": 1},
    "no pad and an end": {"input_ids": IDS, "pad_token_id": None, "eos_token_id": 9, "max_new_tokens": NEW},
    "no pad, no end": {"input_ids": IDS, "pad_token_id": None, "max_new_tokens": NEW},
    "minimum above the maximum": {**PADDED, "max_new_tokens": 3, "min_new_tokens": 5, "eos_token_id": 9},
    "end out of the vocabulary": {**PADDED, "max_new_tokens": NEW, "eos_token_id": [engines.VOCABULARY + 3]},
    "no ends": {**PADDED, "max_new_tokens": NEW, "eos_token_id": []},
    "negative end": {**PADDED, "max_new_tokens": NEW, "eos_token_id": -1},
    "temperature of zero": {**PADDED, "max_new_tokens": NEW, "do_sample": True, "temperature": 0.0},
    "unknown argument": {**PADDED, "max_new_tokens": NEW, "speed": "high"},
    "token types": {**PADDED, "max_new_tokens": NEW, "token_type_ids": 0 * IDS},
    "positions given": {**PADDED, "max_new_tokens": NEW, "position_ids": torch.arange(6).expand(2, 6) + 3},
    "ids twice": {**PADDED, "inputs": IDS, "max_new_tokens": NEW},
    "nothing at all": {"max_new_tokens": NEW},
    "half the prompt in ids": {
        "input_ids": IDS,
        "inputs_embeds": torch.zeros(2, 6, engines.HIDDEN),
        "max_new_tokens": NEW,
    },
    "embeddings": {"inputs_embeds": torch.ones(2, 6, engines.HIDDEN), "max_new_tokens": NEW},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore")
def test_outcome_is_transformers(actor, name):
    """The same tokens, or the same exception with the same words; afterwards the engine is right, and fused."""
    arguments = {"max_new_tokens": NEW, **BAD[name]}
    if "max_length" in arguments:
        arguments.pop("max_new_tokens")
    failures = actor.report.failures

    expected = outcome(lambda: actor.expected(**arguments))
    got = outcome(lambda: actor.generated(**arguments))

    assert expected == got
    actor.agree(**PADDED, max_new_tokens=NEW)
    assert failures == actor.report.failures


def test_outcomes_are_of_both_kinds(actor):
    """The list above holds input that raises and input that does not, or the comparison would be an empty one."""
    kinds = {
        name: outcome(lambda name=name: actor.expected(**{"max_new_tokens": NEW, **BAD[name]}))[0]
        for name in (
            "empty batch",
            "ids out of the vocabulary",
            "mask too short",
            "pad is the end and no mask",
            "mask of zeros",
        )
    }

    assert kinds["ids out of the vocabulary"] == kinds["mask too short"] == "raises"
    assert kinds["pad is the end and no mask"] == kinds["mask of zeros"] == "returns"
