"""Half precision: as close to a float32 run of the same weights as eager is, and tokens that part only at near ties."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import engines
from tests.agreement import Actor, assert_same_tokens

NEW = 40
ROWS = 6
LENGTH = 9
PADS = (3, 0, 1, 5)
# A max over thousands of logits of two different roundings; the promise is 10 %.
WORSE = 1.1


@pytest.fixture(
    scope="module", params=[(family, dtype) for family in ("opt", "llama", "qwen2") for dtype in ("bf16", "fp16")]
)
def run(request):
    """One greedy call with logits, and the logits of float32 and of eager half precision along the same tokens."""
    family, dtype = request.param
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        actor = Actor(engines.build_model(family), dtype=dtype)
        # A copy of the engine's model is an ordinary model with the same roundings, buffers included.
        half = copy.deepcopy(actor.model)
        exact = copy.deepcopy(half).float()
        prompt = engines.prompts(ROWS, LENGTH, PADS)
        result = actor.generated(**prompt, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
        last = actor.report.last_call
        mask = torch.cat([prompt["attention_mask"], torch.ones(ROWS, NEW, dtype=torch.long)], dim=1)
        yield {
            "dtype": actor.model.dtype,
            "path": last.path,
            "cache_mib": actor.report.cache_mib,
            "tokens": result.sequences[:, LENGTH:],
            "region": torch.stack(result.logits, dim=1).float(),
            "eager": along(half, result.sequences, mask),
            "exact": along(exact, result.sequences, mask),
        }
        actor.let_go()


@pytest.fixture(autouse=True)
def clean_hepatch():
    """Replace the suite's own: the engine lives as long as the module's fixture."""


def along(model, sequences, mask):
    """The logits that stock decoding with a cache gives along given sequences: float32 `[rows, NEW, vocabulary]`."""
    from transformers import DynamicCache

    cache, found = DynamicCache(config=model.config), []
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        for length in range(LENGTH, LENGTH + NEW):
            new = slice(0 if length == LENGTH else length - 1, length)
            output = model(
                sequences[:, new],
                attention_mask=mask[:, :length],
                position_ids=positions[:, new],
                cache=cache,
                use_cache=True,
            )
            found.append(output.logits[:, -1].float())
    return torch.stack(found, dim=1)


def test_region_ran_in_half_precision(run):
    """The run is the one that was meant."""
    assert run["path"] == "fused"
    assert run["dtype"] in {torch.bfloat16, torch.float16}
    assert (run["eager"] - run["exact"]).abs().max() > 1e-3, "half precision must show"


def test_log_probabilities_are_as_close_to_float32_as_eager_ones(run):
    """The largest and the mean difference to float32 are at most 10 % above eager's own."""
    exact = run["exact"].log_softmax(-1)
    ours, theirs = ((run[name].log_softmax(-1) - exact).abs() for name in ("region", "eager"))

    assert ours.max() <= WORSE * theirs.max()
    assert ours.mean() <= WORSE * theirs.mean()


def test_tokens_part_from_float32_only_at_near_ties(run):
    """Where the region's token is not float32's, float32 holds the two within the noise that half precision has."""
    noise = 2 * (run["eager"] - run["exact"]).abs().amax()
    best = run["exact"].max(-1)
    chosen = run["exact"].gather(-1, run["tokens"][..., None])[..., 0]
    margin = (best.values - chosen)[best.indices != run["tokens"]]

    assert (margin <= noise).all(), margin
    assert (best.indices == run["tokens"]).float().mean() > 0.9


class TestAutocast:
    def test_first_call_under_autocast(self, monkeypatch):
        """A region compiled under autocast keeps a cache of autocast's dtype and gives the oracle's tokens."""
        monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        actor = Actor(engines.build_model("llama"))
        prompt = engines.prompts(3, 8, (2, 0, 5))

        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = actor.expected(**prompt, max_new_tokens=4)
            got = actor.generated(**prompt, max_new_tokens=4)
            last = actor.report.last_call

        assert last.path == "fused"
        assert_same_tokens(expected, got)
        actor.let_go()

    def test_autocast_that_comes_later_is_refused(self, monkeypatch):
        """A call under another autocast than the region's is transformers' own, with the rule as the reason."""
        monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", "eager")
        actor = Actor(engines.build_model("llama"))
        prompt = engines.prompts(3, 8, (2, 0, 5))
        before = actor.agree(**prompt, max_new_tokens=12)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = actor.expected(**prompt, max_new_tokens=12)
            got = actor.generated(**prompt, max_new_tokens=12)
            last = actor.report.last_call

        assert_same_tokens(expected, got)
        assert last.path == "eager"
        assert "[autocast]" in last.reason
        assert torch.equal(before, actor.agree(**prompt, max_new_tokens=12))
        actor.let_go()
