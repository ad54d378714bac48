"""What the regions keep from call to call: growth, compilations, and Inductor itself."""

from __future__ import annotations

import pytest
import torch

import hepatch
from hepatch import attachments
from tests import engines
from tests.agreement import Actor

LONG = {"opt": "max_position_embeddings", "llama": "max_position_embeddings", "gpt2": "n_positions"}
CALLS = ((3, 8, 12), (2, 130, 20), (5, 250, 30), (9, 20, 5), (2, 540, 20), (3, 8, 12))


def graphs():
    """Graphs that Dynamo compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", [*LONG, "bloom", "mistral"])
def test_growing_rows_and_lengths_compile_nothing(family):
    """Caches that outgrow their first size, rows and positions, need no new compilation and give the same tokens."""
    sizes = {LONG[family]: 1024} if family in LONG else {} if family == "bloom" else {"max_position_embeddings": 1024}
    actor = Actor(engines.build_model(family, **sizes))
    actor.agree(**engines.prompts(*CALLS[0][:2], (2, 0, 5)), max_new_tokens=CALLS[0][2])
    before, compiled, cache = graphs(), actor.report.compilations, actor.report.cache_mib

    for batch, length, new in CALLS:
        actor.agree(**engines.prompts(batch, length, (3,)), max_new_tokens=new)

    assert (before, compiled) == (graphs(), actor.report.compilations)
    assert actor.report.cache_mib > cache > 0


def test_one_row_first():
    """An engine whose first call has one row, and later ones more."""
    actor = Actor(engines.build_model("llama"))

    for batch in (1, 2, 4, 1):
        actor.agree(**engines.prompts(batch, 6, seed=batch), max_new_tokens=8)


def test_one_token_prompt_on_a_fresh_engine():
    """A prompt of one token is a prompt, also when nothing came before it."""
    actor = Actor(engines.build_model("opt"))

    actor.agree(**engines.prompts(2, 1), max_new_tokens=8)


def test_generate_draws_no_random_numbers_when_greedy():
    """Compiling, warming up and decoding greedily leave the generator where it was."""
    actor = Actor(engines.build_model("llama"))
    state = torch.get_rng_state()

    for new in (8, 8):
        actor.generated(**engines.prompts(2, 6), max_new_tokens=new)

    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.inductor
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_inductor(family):
    """The real compiler: equal tokens for all that a call may change; one compilation, and no random number drawn."""
    actor = Actor(engines.build_model(family, max_position_embeddings=512), stage=2, lr=0.05)
    prompt = engines.prompts(3, 8, (2, 0, 5))
    state = torch.get_rng_state()

    first = actor.agree(**prompt, max_new_tokens=12)
    before, compiled = graphs(), actor.report.compilations
    for batch, length, new in ((2, 5, 20), (5, 130, 12), (4, 1, 3), (2, 250, 20), (3, 8, 12)):
        actor.agree(**engines.prompts(batch, length, (1,) if length > 1 else ()), max_new_tokens=new)
    end = first[1, 8 + 5].item()
    actor.agree(**prompt, max_new_tokens=12, eos_token_id=[end, first[0, 8 + 2].item()])

    assert compiled >= 1
    assert (before, compiled) == (graphs(), actor.report.compilations)
    assert torch.equal(state, torch.get_rng_state())

    actor.train()
    assert not torch.equal(first, actor.agree(**prompt, max_new_tokens=12))
    assert (before, compiled) == (graphs(), actor.report.compilations)


@pytest.mark.parametrize("first", [(2, 1, 5), (4, 4, 4), (16, 3, 8), (64, 16, 10), (1, 5, 6)], ids=str)
def test_sizes_that_meet_in_the_first_call(monkeypatch, first):
    """Rows that equal the window, the heads, the width or the prompt in the first call tie nothing together."""
    monkeypatch.setenv("HEPATCH_BUCKET_TOKENS", "16")
    actor = Actor(engines.build_model("llama", num_hidden_layers=1))
    batch, length, new = first
    actor.agree(**engines.prompts(batch, length), max_new_tokens=new)
    before, compiled = graphs(), actor.report.compilations

    for other in ((2, 8, 12), (3, 30, 20), (16, 16, 16), (5, 1, 40), (2, 60, 4)):
        actor.agree(**engines.prompts(*other[:2], (1,) if other[1] > 1 else ()), max_new_tokens=other[2])

    assert (before, compiled) == (graphs(), actor.report.compilations)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_bound_on_recordings(monkeypatch, limit):
    """Keys beyond the limit are padded up or dropped whole; tokens stay right, calls fused, and the bound holds."""
    monkeypatch.setenv("HEPATCH_BUCKET_TOKENS", "16")
    monkeypatch.setenv("HEPATCH_MAX_RECORDINGS", str(limit))
    actor = Actor(engines.build_model("opt", num_hidden_layers=1))
    most = 0

    for batch, length, new in ((2, 5, 6), (2, 5, 40), (3, 30, 30), (2, 5, 6), (6, 3, 9), (3, 60, 3), (2, 5, 6)):
        actor.agree(**engines.prompts(batch, length, (1,), seed=length), max_new_tokens=new)
        most = max(most, attachments.of_model(actor.model).regions.admitted)

    assert 1 <= most <= limit
    assert actor.report.recording_limit == limit


class TestRelease:
    def test_memory_is_given_back_and_taken_again(self):
        """Release frees the cache at once and the next generate is right; twice, or before any call, is harmless."""
        actor = Actor(engines.build_model("llama"))
        hepatch.release(actor.engine)
        first = actor.agree(**engines.prompts(3, 8, (2, 0, 5)), max_new_tokens=8)
        held = actor.report.cache_mib

        for _ in range(2):
            hepatch.release(actor.engine)
        released = actor.report

        assert held > 0
        assert (released.cache_mib, released.active) == (0, True)
        assert torch.equal(first, actor.agree(**engines.prompts(3, 8, (2, 0, 5)), max_new_tokens=8))
        assert actor.report.cache_mib == held

    def test_reset_starts_afresh(self):
        """Reset gives an engine as if it had just been built: no cache, no failures, and a next call that is right."""
        actor = Actor(engines.build_model("llama"))
        first = actor.agree(**engines.prompts(3, 8, (2, 0, 5)), max_new_tokens=8)

        hepatch.reset(actor.engine)
        report = actor.report

        assert (report.cache_mib, report.failures, report.recoveries) == (0, (), 0)
        assert torch.equal(first, actor.agree(**engines.prompts(3, 8, (2, 0, 5)), max_new_tokens=8))

    def test_reset_reads_the_environment(self, monkeypatch):
        """Settings that changed since the engine was built count after a reset."""
        actor = Actor(engines.build_model("opt", num_hidden_layers=1))
        monkeypatch.setenv("HEPATCH_MAX_RECORDINGS", "7")
        before = actor.report.recording_limit

        hepatch.reset(actor.engine)

        assert (before, actor.report.recording_limit) == (64, 7)
