"""One RLHF iteration on DeepSpeed's HybridEngine: eval, generate, reward, train, backward, step."""

from __future__ import annotations

import inspect
import io
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import deepspeed
import torch

from hepatch.commands.actor import Actor
from hepatch.commands.world import join_world_of_one

GREEDY: Mapping[str, Any] = {"do_sample": False}
SAMPLED: Mapping[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50}


@dataclass(frozen=True)
class Rollout:
    """What one `generate` gave.

    Attributes:
        sequences: int64 `[batch, prompt_tokens + new_tokens]`.
        new_tokens: columns added, which is the number of decode steps.
        seconds: wall time of the call.
    """

    sequences: torch.Tensor
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Update:
    """What one training step did.

    Attributes:
        reward: the mean over the batch, before the step.
        loss: the mean over the micro batches.
        seconds: wall time of forward, backward and step over the whole batch.
    """

    reward: float
    loss: float
    seconds: float


def build_engine(actor: Actor, micro_batch: int, new_tokens: int) -> Any:
    """A HybridEngine with ZeRO-2 around the actor's model, in this process alone.

    Args:
        actor: gives the model and the batch size.
        micro_batch: rows per training forward; it divides the batch.
        new_tokens: the longest answer.
    """
    join_world_of_one(cuda=actor.model.device.type == "cuda")
    rows = actor.prompts["input_ids"].shape[0]
    config = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": actor.model.dtype == torch.bfloat16},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "hybrid_engine": {"enabled": True, "max_out_tokens": actor.prompt_tokens + new_tokens},
    }
    # An optimizer of torch: DeepSpeed's own would be compiled first, which needs a toolkit.
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=1e-5)
    return deepspeed.initialize(model=actor.model, optimizer=optimizer, config=config)[0]


def roll_out(engine: Any, actor: Actor, new_tokens: int, how: Mapping[str, Any]) -> Rollout:
    """The answers of the engine as it is now.

    Args:
        engine: DeepSpeed's HybridEngine.
        actor: gives the prompts.
        new_tokens: the longest answer; one that ends earlier is padded.
        how: GREEDY or SAMPLED.
    """
    # eval() prints a line of latencies, through the middle of a progress bar and of nothing that the tables lack.
    with redirect_stdout(io.StringIO()):
        engine.eval()
    _wait_for_device(actor)
    start = time.perf_counter()
    with torch.no_grad():
        sequences = engine.generate(**actor.prompts, max_new_tokens=new_tokens, **how)
    _wait_for_device(actor)
    return Rollout(sequences, sequences.shape[1] - actor.prompt_tokens, time.perf_counter() - start)


def rewards(actor: Actor, sequences: torch.Tensor) -> torch.Tensor:
    """A simple taste: an answer that does not repeat itself, and that comes to an end.

    Returns:
        float32 `[batch]`: the share of distinct token pairs, plus 1 where the answer ended by itself.
    """
    scores = []
    answers = sequences[:, actor.prompt_tokens :]
    for answer, kept in zip(answers, actor.answer_mask(sequences).bool(), strict=True):
        tokens = answer[kept].tolist()
        pairs = list(pairwise(tokens))
        ended = bool(torch.isin(answer[kept][-1:], actor.end_ids).any())
        scores.append(len(set(pairs)) / max(len(pairs), 1) + float(ended))
    return torch.tensor(scores, device=sequences.device)


def update(engine: Any, actor: Actor, sequences: torch.Tensor, micro_batch: int) -> Update:
    """One step of policy gradient: answers above the batch's mean reward become more likely, the others less.

    Args:
        engine: DeepSpeed's HybridEngine.
        actor: gives the prompts' mask.
        sequences: int64 `[batch, prompt_tokens + new_tokens]`, a rollout of this very policy.
        micro_batch: rows per forward.
    """
    reward = rewards(actor, sequences)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    answered = actor.answer_mask(sequences)
    mask = torch.cat((actor.prompts["attention_mask"], answered), dim=1)

    engine.train()
    _wait_for_device(actor)
    start = time.perf_counter()
    losses = []
    for first in range(0, len(sequences), micro_batch):
        rows = slice(first, first + micro_batch)
        log_probs = _answer_log_probs(engine, actor, sequences[rows], mask[rows])
        gain = (advantage[rows].unsqueeze(1) * log_probs * answered[rows]).sum() / answered[rows].sum()
        losses.append(-gain.detach())
        engine.backward(-gain)
        engine.step()
    _wait_for_device(actor)
    return Update(float(reward.mean()), float(torch.stack(losses).mean()), time.perf_counter() - start)


def _answer_log_probs(engine: Any, actor: Actor, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # [rows, new_tokens]; the logits before an answer token are the ones that it was chosen by.
    new_tokens = sequences.shape[1] - actor.prompt_tokens
    inputs = {
        "input_ids": sequences,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "use_cache": False,
        "logits_to_keep": new_tokens + 1,
    }
    known = inspect.signature(actor.model.forward).parameters
    logits = engine(**{name: value for name, value in inputs.items() if name in known}).logits
    log_probs = logits[:, -new_tokens - 1 : -1].float().log_softmax(dim=-1)
    chosen: torch.Tensor = log_probs.gather(2, sequences[:, -new_tokens:, None]).squeeze(2)
    return chosen


def _wait_for_device(actor: Actor) -> None:
    if actor.model.device.type == "cuda":
        torch.cuda.synchronize()
