"""Sampling in the region draws from the distribution that transformers draws from, and only sampling draws."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from scipy.stats import chisquare

from tests import engines
from tests.agreement import Actor, assert_same_tokens, outcome

VOCABULARY = 16
ROWS = 1024
CALLS = 4
NEW = 3
NEW_TOKENS = 12
END = 7
# A seed decides every draw, so a pass is a pass for ever; chance fails a correct sampler one time in ten thousand.
LIKELY = 1e-4
UNLIKELY = 1e-9

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 4.0},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    "end": {"eos_token_id": [END, 9], "top_k": 16},
    "minimum": {"eos_token_id": [END, 9], "min_length": 7, "temperature": 0.8},
}


@pytest.fixture(scope="module")
def actor():
    """A small vocabulary and logits that are neither flat nor certain; the module's tests share it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        environment.setenv("HEPATCH_BUCKET_TOKENS", "16")
        model = engines.build_model("llama", vocabulary=VOCABULARY)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.7)
        actor = Actor(model, lr=0.05)
        yield actor
        actor.let_go()


@pytest.fixture(autouse=True)
def clean_hepatch():
    """Replace the suite's own: the engine lives as long as the module."""


@functools.cache
def prompt():
    """One prompt of five tokens, the same for every draw."""
    return engines.prompts(1, 5, vocabulary=VOCABULARY)["input_ids"]


def arguments(settings):
    """Sampling with nothing but these settings: the defaults of a generation config are switched off."""
    return {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, **settings}


def distribution(actor, settings):
    """The probability of every sequence of `NEW` tokens by transformers' own processed scores: `[VOCABULARY] * NEW`.

    A prefix is made part of the prompt and one token is asked for, so every factor comes from a forward, the processors
    and a softmax of transformers alone.
    """
    ended = settings.get("eos_token_id", [])
    joint = torch.ones(())
    prefixes = prompt().new_zeros(1, 0)
    for _ in range(NEW):
        ids = torch.cat([prompt().expand(len(prefixes), -1), prefixes], dim=1)
        given = actor.expected(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **arguments(settings),
        )
        probabilities = given.scores[0].double().softmax(-1)
        over = torch.isin(prefixes, torch.tensor(ended, dtype=torch.long)).any(-1)
        probabilities[over] = torch.nn.functional.one_hot(torch.tensor(engines.PAD), VOCABULARY).double()
        joint = joint.reshape(-1, 1).double() * probabilities
        columns = [torch.arange(VOCABULARY)] * (prefixes.shape[1] + 1)
        prefixes = torch.cartesian_prod(*columns).reshape(joint.numel(), -1)
    return joint.reshape(-1)


def draws(actor, settings):
    """How often the region drew each sequence of `NEW` tokens, flat."""
    counts = torch.zeros(VOCABULARY**NEW, dtype=torch.long)
    base = torch.tensor([VOCABULARY**power for power in reversed(range(NEW))])
    for _ in range(CALLS):
        ids = actor.generated(
            input_ids=prompt(),
            max_new_tokens=NEW,
            num_return_sequences=ROWS,
            pad_token_id=engines.PAD,
            **arguments(settings),
        )
        actor.assert_fused(ids)
        assert ids.shape == (ROWS, 5 + NEW)
        assert torch.equal(ids[:, :5], prompt().expand(ROWS, -1))
        counts += torch.bincount((ids[:, 5:] * base).sum(-1), minlength=len(counts))
    return counts


def p_value(counts, probabilities):
    """Pearson's test of counts against probabilities; sequences rarer than five in all draws form one cell."""
    expected = probabilities * counts.sum()
    frequent = expected >= 5
    cells = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    if cells[-1] < 5:
        # Too rare even together: what there is of it joins the largest cell.
        largest = cells[:-1].argmax()
        cells[largest] += cells[-1]
        observed[largest] += observed[-1]
        cells, observed = cells[:-1], observed[:-1]
    assert len(cells) > 10, "too few cells to tell one distribution from another"
    return chisquare(observed.double().numpy(), (cells * observed.sum() / cells.sum()).numpy()).pvalue


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_is_transformers(actor, name):
    """Sequences of three tokens, two of them chosen in the region, follow transformers' joint probabilities."""
    settings = SETTINGS[name]
    torch.manual_seed(1234)

    probabilities, counts = distribution(actor, settings), draws(actor, settings)

    assert counts.sum() == ROWS * CALLS
    assert not counts[probabilities == 0].any(), "a forbidden sequence was drawn"
    assert p_value(counts, probabilities) > LIKELY


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_the_test_tells_settings_apart(actor, name):
    """Draws without the setting fail the same test, so it would notice a region that ignores it."""
    torch.manual_seed(1234)
    ends = {key: value for key, value in SETTINGS[name].items() if key == "eos_token_id" and name == "minimum"}

    probabilities, counts = distribution(actor, SETTINGS[name]), draws(actor, ends)

    assert counts[probabilities == 0].any() or p_value(counts, probabilities) < UNLIKELY


def test_seed_reproduces_from_the_first_call_on(monkeypatch):
    """One seed gives the same tokens in the call that compiles and in later ones; another seed gives others."""
    monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", "eager")
    actor = Actor(engines.build_model("opt", vocabulary=VOCABULARY))
    asked = {**engines.prompts(4, 6, (2, 0, 1), vocabulary=VOCABULARY), "do_sample": True, "max_new_tokens": 20}

    def seeded(seed):
        torch.manual_seed(seed)
        ids = actor.generated(**asked)
        actor.assert_fused(ids)
        return ids, torch.get_rng_state()

    first, state = seeded(3)
    other, _ = seeded(4)
    actor.agree(**engines.prompts(3, 9, vocabulary=VOCABULARY), max_new_tokens=30)
    again, state_again = seeded(3)
    follow = actor.generated(**asked)

    assert torch.equal(first, again)
    assert torch.equal(state, state_again)
    assert not torch.equal(first, other)
    assert not torch.equal(again, follow), "a call must move the generator"
    actor.let_go()


def test_rows_are_independent(actor):
    """Rows with the same prompt do not share their draws."""
    torch.manual_seed(5)

    ids = actor.generated(input_ids=prompt(), max_new_tokens=8, num_return_sequences=64, **arguments({}))

    assert len(ids.unique(dim=0)) > 50


def test_numbers_change_without_compiling(actor):
    """Temperature, top-p, min-p and penalty may change from call to call; only kinds of processors make a new step."""
    base = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "temperature": 1.4}
    torch.manual_seed(6)
    actor.generated(input_ids=prompt(), max_new_tokens=4, num_return_sequences=8, **arguments(base))
    before = actor.report.compilations
    cold = {**base, "temperature": 0.01, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1.1}

    got = actor.generated(input_ids=prompt(), max_new_tokens=9, num_return_sequences=8, **arguments(cold))

    actor.assert_fused(got)
    assert before == actor.report.compilations
    # At this temperature every draw is the highest score, which can be compared.
    greedy = actor.expected(input_ids=prompt(), max_new_tokens=9, repetition_penalty=1.1)
    assert_same_tokens(greedy.expand(8, -1), got)


def test_minimum_of_new_tokens_while_sampling(actor):
    """No row ends before the minimum, some end right after it, and ended rows are padded."""
    torch.manual_seed(8)
    ends = list(range(2, 10))

    ids = actor.generated(
        input_ids=prompt(),
        max_new_tokens=12,
        min_new_tokens=4,
        eos_token_id=ends,
        num_return_sequences=64,
        **arguments({}),
    )[:, 5:]

    actor.assert_fused(torch.zeros(64, 5 + ids.shape[1]))
    ended = torch.isin(ids, torch.tensor(ends))
    assert not ended[:, :4].any()
    assert ended[:, 4].any()
    assert ended.sum(1).max() == 1
    after = ended.cumsum(1).bool() & ~ended
    assert (ids[after] == engines.PAD).all()


class TestNoDistribution:
    """Scores that are NaN: from the prompt on, and from a token in the middle on."""

    @pytest.fixture(scope="class")
    def lively(self):
        """An engine, and a prompt whose greedy answer never says a token twice."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
            actor = Actor(engines.build_model("llama"))
            for seed in range(50):
                ids = actor.expected(**engines.prompts(1, 5, seed=seed), max_new_tokens=NEW_TOKENS)
                if len(ids.unique()) == ids.numel():
                    break
            else:
                pytest.fail("every answer repeats a token")
            yield actor, ids[0].tolist()
            actor.let_go()

    @pytest.mark.parametrize("culprit", [0, 5, 6, 10, 15])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_ends_as_in_transformers(self, lively, culprit, do_sample):
        """The outcome is transformers' own, an exception when sampling; with healthy weights the next call is right."""
        actor, answer = lively
        ids = torch.tensor([answer[:5]] * 2)
        asked = {"input_ids": ids, "max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "top_k": 1}
        free = actor.agree(**asked)
        assert free[0].tolist() == answer

        with self.poisoned(actor, answer[culprit]):
            expected = outcome(lambda: actor.expected(**asked))
            got = outcome(lambda: actor.generated(**asked))

        assert expected == got
        assert (expected[0] == "raises") is do_sample
        assert_same_tokens(free, actor.agree(**asked))

    @staticmethod
    @contextlib.contextmanager
    def poisoned(actor, token):
        """A token's embedding is NaN for a while, and so is every score behind it."""
        tables = [model.model.embed_tokens.weight for model in (actor.model, actor.oracle)]
        kept = tables[0][token].detach().clone()
        with torch.no_grad():
            for table in tables:
                table[token] = float("nan")
            yield
            for table in tables:
                table[token] = kept
