"""Greedy tokens of the region against stock transformers, for every architecture, in float32.

One engine serves all tests of its architecture, one after the other, as in a training loop: every call also shows that
the calls before it left nothing behind.
"""

from __future__ import annotations

import pytest
import torch

from tests import engines
from tests.agreement import Actor, assert_same_tokens

NEW = 12


@pytest.fixture(scope="module", params=list(engines.FAMILIES))
def actor(request):
    """An engine with the cheap backend; a small bucket, so that short sequences cross several."""
    stage = 2 if request.param in {"opt", "llama"} else 0
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        environment.setenv("HEPATCH_BUCKET_TOKENS", "16")
        model = engines.build_model(request.param)
        actor = Actor(model, stage=stage, lr=0.05)
        yield actor
        actor.let_go()


@pytest.fixture(autouse=True)
def clean_hepatch():
    """Replace the suite's own: the engine lives as long as the module."""


@pytest.fixture(autouse=True)
def small_bucket(monkeypatch):
    """Keep the settings that the engine was built with."""
    monkeypatch.setenv("HEPATCH_BUCKET_TOKENS", "16")


def new_tokens(actor, prompt, count=NEW):
    """The oracle's new tokens `[batch, count]`, for choosing ends of sequence."""
    tokens = actor.expected(**prompt, max_new_tokens=count)[:, prompt["input_ids"].shape[1] :]
    assert len(tokens.unique()) > 5, "a model that repeats itself shows nothing"
    return tokens


def first_end(row, ends):
    """The index of the first of `ends` in a row of new tokens, or its length."""
    return next((index for index, token in enumerate(row.tolist()) if token in ends), len(row))


@pytest.mark.parametrize(
    ("batch", "length", "pads", "new"),
    [
        (3, 8, (2, 0, 5), 12),
        (3, 5, (0, 1, 3), 20),
        (4, 12, (0, 3, 1, 7), 9),
        (2, 12, (3, 1), 30),
        (5, 1, (), 6),
        (2, 40, (0, 33), 3),
        (2, 7, (), 1),
        (3, 6, (5, 4, 2), 2),
        (3, 8, (2, 0, 4), 12),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_left_padded_batches(actor, batch, length, pads, new):
    """Any prompt length, batch, padding and number of new tokens; windows of eight are crossed and started beyond."""
    actor.agree(**engines.prompts(batch, length, pads, seed=length), max_new_tokens=new)


def test_one_row(actor):
    """A batch of one, twice: alone is a shape of its own."""
    for length in (9, 4):
        actor.agree(**engines.prompts(1, length, seed=length), max_new_tokens=NEW)


def test_row_alone_is_row_in_batch(actor):
    """What a row says does not depend on its company or its padding (R13), a column of nothing but padding included."""
    pads = (1, 6, 9)
    batch = engines.prompts(3, 12, pads, seed=3)
    together = actor.agree(**batch, max_new_tokens=NEW)[:, 12:]

    for row, pad in enumerate(pads):
        alone = actor.agree(input_ids=batch["input_ids"][row : row + 1, pad:], max_new_tokens=NEW)
        assert_same_tokens(together[row : row + 1], alone[:, 12 - pad :])


def test_several_ends_of_sequence_at_different_steps(actor):
    """Rows end when they meet one of several ids, are padded from there, and the batch ends with its last row."""
    prompt = engines.prompts(4, 9, (0, 4, 2, 1), seed=5)
    free = new_tokens(actor, prompt)
    ends = [free[0, 1].item(), free[1, 4].item(), free[2, 6].item(), free[3, 8].item()]
    stops = [first_end(row, ends) for row in free]
    assert len(set(stops)) > 2, "rows must end at different steps"
    assert max(stops) < NEW - 1, "the batch must end early"

    got = actor.agree(**prompt, max_new_tokens=NEW, eos_token_id=ends)

    assert got.shape[1] == 9 + max(stops) + 1
    for row, stop in enumerate(stops):
        assert set(got[row, 9 + stop + 1 :].tolist()) <= {engines.PAD}


def test_one_row_goes_on_to_the_limit(actor):
    """Rows that have ended wait for one that never does."""
    prompt = engines.prompts(3, 7, (0, 2, 0), seed=6)
    free = new_tokens(actor, prompt, 24)
    end = next(token for token in free[0].tolist() if token not in free[2].tolist())

    got = actor.agree(**prompt, max_new_tokens=24, eos_token_id=end)

    assert got.shape[1] == 7 + 24
    assert (got[0] == engines.PAD).any()


@pytest.mark.parametrize("step", [0, 1, 2, 7, 8, 9])
def test_whole_batch_ends_at_one_step(actor, step):
    """The prompt's own token, the region's first, and both sides of the eighth step, where the stop flags are read."""
    for seed in range(50):
        prompt = engines.prompts(1, 10, seed=seed)
        free = actor.expected(**prompt, max_new_tokens=NEW)[0, 10:].tolist()
        if free.index(free[step]) == step:
            break
    else:
        pytest.fail("no prompt shows a new token at this step")
    twice = {name: tensor.repeat(2, 1) for name, tensor in prompt.items()}
    end = free[step]

    expected = actor.expected(**twice, max_new_tokens=NEW, eos_token_id=end)
    got = actor.generated(**twice, max_new_tokens=NEW, eos_token_id=end)

    assert_same_tokens(expected, got)
    assert got.shape[1] == 10 + step + 1
    assert actor.report.last_call.path == "fused"


def test_nothing_is_compiled_again(actor):
    """After the first call other prompt lengths, batches, ends of sequence and counts of new tokens compile nothing."""
    actor.agree(**engines.prompts(3, 8, (2, 0, 5)), max_new_tokens=4)
    before, graphs = actor.report.compilations, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before >= 1

    for batch, length, new in ((2, 8, 12), (4, 8, 12), (7, 3, 30), (2, 61, 20), (12, 1, 50), (3, 100, 3)):
        actor.agree(**engines.prompts(batch, length, (1,) if length > 1 else ()), max_new_tokens=new)

    assert actor.report.compilations == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_weights_that_move_are_seen(actor):
    """After an optimizer step the tokens are those of the new weights, and nothing was compiled for it."""
    prompt = engines.prompts(3, 8, (2, 0, 5), seed=13)
    before = actor.agree(**prompt, max_new_tokens=NEW)
    compilations = actor.report.compilations

    for cycle in range(2):
        actor.train(seed=cycle)
        after = actor.agree(**prompt, max_new_tokens=NEW)
        assert not torch.equal(before, after), "the step must move the tokens"
        before = after

    assert actor.report.compilations == compilations
