"""Tokens of a region over DeepSpeed's containers, against the model's own layers and against the eager engine."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from hepatch import attachments
from tests import engines
from tests.agreement import Actor, assert_same_tokens
from tests.forked import run_python

# Rows, columns, padding, new tokens: lengths up and down, batches up and down, prompts that meet at the same positions.
CALLS = [
    (2, 6, (2,), 10),
    (2, 9, (3, 0), 20),
    (2, 4, (), 5),
    (4, 8, (0, 3, 1), 12),
    (1, 12, (), 8),
    (3, 20, (7,), 30),
    (2, 6, (), 2),
    (2, 2, (1,), 9),
    (1, 2, (), 40),
]


@pytest.mark.parametrize("family", ["opt", "llama"])
class TestMixedCalls:
    """One engine, many shapes."""

    def test_tokens_are_the_layers_own(self, build: Any, family: str) -> None:
        actor = build(family)
        for rows, columns, pads, new in CALLS:
            prompt = engines.prompts(rows, columns, pads, seed=rows + columns)

            got = actor.generated(**prompt, max_new_tokens=new)

            assert_same_tokens(actor.expected(**prompt, max_new_tokens=new), got)
            assert actor.report.last_call.path == "fused"
        assert actor.report.recoveries == 0
        assert actor.report.backend == "kernels"

    def test_rows_that_end_early(self, build: Any, family: str) -> None:
        actor = build(family)
        prompt = engines.prompts(3, 8, (2, 0, 5))
        answer = actor.expected(**prompt, max_new_tokens=16)
        ends = [int(answer[row, 8 + step]) for row, step in enumerate((2, 5, 9))]
        for several in (ends, ends[:1]):
            asked = {**prompt, "max_new_tokens": 16, "eos_token_id": several}
            assert_same_tokens(actor.expected(**asked), actor.generated(**asked))
            assert actor.report.last_call.path == "fused"

    def test_after_a_training_step(self, build: Any, family: str) -> None:
        actor = build(family, lr=0.05)
        prompt = engines.prompts(2, 7, (2,))
        before = actor.agree(**prompt, max_new_tokens=12)

        actor.train()

        after = actor.agree(**prompt, max_new_tokens=12)
        assert not torch.equal(before, after), "the step must have moved the tokens, or nothing is shown"


def test_sampling_is_reproducible_and_stays_in_the_support(build: Any) -> None:
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    asked = {**prompt, "max_new_tokens": 12, "do_sample": True, "top_k": 5, "temperature": 1.5, "pad_token_id": 1}

    answers = []
    for _ in range(2):
        torch.manual_seed(3)
        answers.append(actor.generated(**asked))

    assert_same_tokens(*answers)
    assert actor.report.last_call.path == "fused"
    with torch.no_grad():
        logits = actor.oracle(answers[0], attention_mask=(answers[0] != 1).long()).logits
    for column in range(6, 18):
        best = logits[1, column - 1].topk(5).indices.tolist()
        assert int(answers[0][1, column]) in best


def test_buffers_of_another_selection_void_no_recording(build: Any) -> None:
    """CUDA graph trees would replay where the region, and with it the ledger, expects a recording."""
    actor = build()
    prompt = engines.prompts(2, 6, (2,))
    for _ in range(2):
        actor.agree(**prompt, max_new_tokens=6)
    region = attachments.of_model(actor.model).regions.any_region
    visits = dict(region.visits)

    actor.generated(**prompt, max_new_tokens=6, do_sample=True)
    actor.generated(**prompt, max_new_tokens=6, return_dict_in_generate=True, output_scores=True, output_logits=True)
    actor.agree(**prompt, max_new_tokens=6)

    assert dict(region.visits) == {key: count + 1 for key, count in visits.items()}


def test_dict_output_with_scores_and_a_cache_of_transformers_own(build: Any) -> None:
    actor = build()
    asked = {
        **engines.prompts(2, 6, (2,)),
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }

    expected, got = actor.expected(**asked), actor.generated(**asked)

    assert_same_tokens(expected.sequences, got.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(got, name)), torch.stack(getattr(expected, name)))
    assert type(got.past_key_values) is type(expected.past_key_values)
    for ours, theirs in zip(got.past_key_values, expected.past_key_values, strict=True):
        torch.testing.assert_close(ours[0][1], theirs[0][1])
        torch.testing.assert_close(ours[1][1], theirs[1][1])


_EAGER = """
import json, os, sys
os.environ["HEPATCH"] = "0"
import torch
torch.set_num_threads(1)
from tests import engines
from tests.kernels import families, fallbacks
fallbacks.install()
model = families.build({family!r})
engine = engines.build_engine(model, dtype={dtype!r}, stage={stage!r}, lr=0.05)
engine.eval()
assert len(engine._inference_containers) == 2
for weight in engine.module.parameters():
    weight.requires_grad_(True)  # stock freezes the head, which is another fault than the one looked for here
answers = []
with torch.no_grad():
    for rows, columns, pads, new in {calls!r}:
        prompt = engines.prompts(rows, columns, pads, seed=rows + columns)
        out = engine.generate(**prompt, max_new_tokens=new, do_sample=False, pad_token_id=1)
        answers.append(out.tolist())
        if len(answers) == {trained!r}:
            torch.manual_seed(1)
            with torch.enable_grad():
                engines.train_step(engine, engines.prompts(2, 12)["input_ids"])
            engine.eval()
print("answer: " + json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("family", "dtype", "stage"),
    [("opt", "fp32", 0), ("llama", "fp32", 2), ("opt", "bf16", 2), ("opt", "bf16", 1), ("llama", "bf16", 0)],
)
def test_tokens_are_those_of_the_eager_engine(build: Any, family: str, dtype: str, stage: int) -> None:
    """The oracle is the unpatched HybridEngine with the same containers, in a process of its own; in bf16 as well."""
    # Stock sizes its workspace by its first batch.
    calls, trained = sorted(CALLS, key=lambda call: -call[0]), 5
    script = _EAGER.format(family=family, calls=calls, dtype=dtype, stage=stage, trained=trained)
    done = run_python(script, PYTHONPATH=os.environ.get("PYTHONPATH"))
    line = next((line for line in done.stdout.splitlines() if line.startswith("answer: ")), None)
    assert line is not None, done.stderr[-2000:]
    eager = json.loads(line.removeprefix("answer: "))
    actor = build(family, dtype=dtype, stage=stage, lr=0.05)

    for index, ((rows, columns, pads, new), expected) in enumerate(zip(calls, eager, strict=True)):
        if index == trained:
            torch.manual_seed(1)
            engines.train_step(actor.engine, engines.prompts(2, 12)["input_ids"])
            actor.engine.eval()
        prompt = engines.prompts(rows, columns, pads, seed=rows + columns)
        got = actor.engine.generate(**prompt, max_new_tokens=new, do_sample=False, pad_token_id=1)
        assert got.tolist() == expected
        assert actor.report.last_call.path == "fused"
    assert actor.report.recoveries == 0


@pytest.mark.inductor
def test_compiled_by_inductor(build: Any) -> None:
    """The real compiler, one compilation for all batches above one, all prompts and all lengths."""
    actor: Actor = build()
    compiled = []
    for rows, columns, pads, new in [(4, 9, (2,), 12), (2, 5, (), 20), (3, 11, (4,), 6)]:
        actor.agree(**engines.prompts(rows, columns, pads), max_new_tokens=new)
        compiled.append(actor.report.compilations)

    assert compiled == [1, 1, 1]
