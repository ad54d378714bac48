"""The self-test: a tiny real engine must say what its weights say, before and after they change.

The oracle is a deep copy of the model, made before the engine exists, of which only the plain forward is used: no
cache, no generate, nothing that hepatch patches. Log-probs are compared as well as tokens, and once more after an
optimizer step that moves them a lot: a region that still read the old weights would show there.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import torch

from hepatch.doctor.findings import Check
from hepatch.report import Report

ROWS, PROMPT, NEW, PADDING, PAD = 3, 9, 12, 4, 1
TOLERANCE = 2e-3
"""Largest difference of log-probs in float32, from orders of summation; stale weights are off by far more."""

LEARNING_RATE = 0.05


def run(zero_stage: int, step: Callable[[str], AbstractContextManager[None]]) -> tuple[list[Check], Report]:
    """Runs it in this process.

    Args:
        zero_stage: of the engine.
        step: shows what is going on.

    Returns:
        The comparisons, and `hepatch.report` of the engine.
    """
    import hepatch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = _model().to(device)
    oracle = copy.deepcopy(model)
    ids, mask = _prompts(device)
    with step("deepspeed.initialize"):
        engine = _engine(model, zero_stage, cuda=cuda)
    checks = []
    with step("plain forward of the untouched copy"):
        expected = _oracle(oracle, ids, mask)
    with step("first generate, which compiles"):
        checks.append(_check("tokens and log-probs", _generate(engine, ids, mask), expected))
    with step("second generate"):
        checks.append(_check("the same in a second call", _generate(engine, ids, mask), expected))
    paths = [_path(hepatch.report(engine))]
    with step("optimizer step, then generate"):
        _train(engine, expected[0])
        trained = _generate(engine, ids, mask)
        oracle.load_state_dict(_weights(engine))
        after = _oracle(oracle, ids, mask)
    moved = float((after[1][:, :1] - expected[1][:, :1]).abs().max())
    checks.append(Check("the step moved the model", moved > 10 * TOLERANCE, f"log-probs by up to {moved:.3f}"))
    checks.append(_check("tokens and log-probs of the new weights", trained, after))
    report = hepatch.report(engine)
    if report.active:
        paths.append(_path(report))
        checks.append(Check("a region served the calls", set(paths) == {"fused"}, ", ".join(paths)))
    return checks, report


def _path(report: Report) -> str:
    return "no call was seen" if report.last_call is None else report.last_call.path


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            # Wide enough for answers that vary; with the usual 0.02 a random model says one token for ever.
            initializer_range=0.25,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
        return LlamaForCausalLM(config).float().eval()


def _prompts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 257, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :PADDING] = PAD
    mask[0, :PADDING] = 0
    return ids.to(device), mask.to(device)


def _engine(model: Any, zero_stage: int, *, cuda: bool) -> Any:
    import deepspeed

    from hepatch.commands.world import join_world_of_one

    join_world_of_one(cuda=cuda)
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": zero_stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": PROMPT + NEW},
        "steps_per_print": 10**9,
    }
    # An optimizer of torch: DeepSpeed's own would be compiled first, which needs a toolkit.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _oracle(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 `[rows, prompt + new]` and log-probs float32 `[rows, new, vocabulary]` by whole forwards."""
    log_probs = []
    with torch.no_grad():
        for _ in range(NEW):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
            log_probs.append(logits.float().log_softmax(-1))
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
            mask = torch.cat([mask, mask.new_ones(ROWS, 1)], -1)
    return ids, torch.stack(log_probs, 1)


def _generate(engine: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by `engine.generate`."""
    # eval() prints a line of latencies.
    with redirect_stdout(io.StringIO()):
        engine.eval()
    answer = engine.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return answer.sequences, torch.stack([logits.float().log_softmax(-1) for logits in answer.logits], 1)


def _train(engine: Any, sequences: torch.Tensor) -> None:
    engine.train()
    engine.backward(engine(input_ids=sequences, labels=sequences, use_cache=False).loss)
    engine.step()


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    """The engine's weights; partitioned ones are gathered."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(engine.module.parameters())
    with GatheredParameters(parameters, enabled=any(hasattr(parameter, "ds_id") for parameter in parameters)):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def _check(name: str, found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> Check:
    same = int((found[0][:, PROMPT:] == expected[0][:, PROMPT:]).sum())
    worst = float((found[1] - expected[1]).abs().max())
    detail = f"{same} of {ROWS * NEW} tokens equal, log-probs differ by at most {worst:.1e} (allowed {TOLERANCE:.0e})"
    return Check(name, same == ROWS * NEW and worst <= TOLERANCE, detail)
