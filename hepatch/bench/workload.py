"""What a benchmark runs: one actor, batches of prompts, one DeepSpeed configuration for every system.

The weights depend on the seed, the device type and the dtype alone (or lie in a folder), so processes that share those
hold the same model; `fingerprint` shows it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hepatch.bench.shapes import SHAPES

if TYPE_CHECKING:
    import torch

SEED = 20
PAD = 1
"""Token id of the padding, in every prompt and answer; prompts never draw it."""

_FIRST_DRAWN = 10
DTYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Workload:
    """Sizes of one benchmark.

    Attributes:
        model: a name of `SHAPES`, or a local folder as `save_pretrained` leaves it.
        dtype: "fp16", "bf16" or "fp32".
        zero_stage: the engine's ZeRO stage.
        batches: rows of the timed calls, one batch after another.
        prompt_tokens: columns of the prompts.
        new_tokens: most new tokens of a row.
        shortest_prompt: where it is set, rows hold so many to `prompt_tokens` tokens and are left-padded.
        early_ends: rows end at end tokens, each at another step; otherwise at `new_tokens` exactly.
        train_batch: rows of the training step; None: the batch nearest to 8.
        trains: whether training steps are part of it.
    """

    model: str
    dtype: str = "fp16"
    zero_stage: int = 2
    batches: tuple[int, ...] = (8,)
    prompt_tokens: int = 256
    new_tokens: int = 128
    shortest_prompt: int | None = None
    early_ends: bool = False
    train_batch: int | None = None
    trains: bool = True

    @property
    def trained_rows(self) -> int:
        """Rows of a training step."""
        return self.train_batch or min(self.batches, key=lambda rows: abs(rows - 8))

    @property
    def model_name(self) -> str:
        """The shape's name, or the folder's last part: no path of a machine gets into a result."""
        return self.model if self.model in SHAPES else Path(self.model).resolve().name

    def prompt_lengths(self, rows: int) -> list[int]:
        """Tokens of each row's prompt; the first row is as long as all columns, so that calls of a batch are alike."""
        if self.shortest_prompt is None:
            return [self.prompt_tokens] * rows
        draw = random.Random(SEED)  # noqa: S311 - lengths of prompts, no secret
        return [
            self.prompt_tokens,
            *(draw.randint(self.shortest_prompt, self.prompt_tokens) for _ in range(rows - 1)),
        ]


def model_config(name: str) -> Any:
    """The transformers configuration of a shape or a local folder.

    Raises:
        ValueError: neither a shape nor a folder with a `config.json`.
    """
    from transformers import AutoConfig

    if name in SHAPES:
        shape = SHAPES[name]
        return AutoConfig.for_model(shape.family, pad_token_id=PAD, **shape.sizes)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} is no shape ({', '.join(SHAPES)}) and no folder with a config.json in it")
    return AutoConfig.from_pretrained(name, local_files_only=True)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in `DTYPES`."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]


def build_model(workload: Workload, device: str, dtype: torch.dtype) -> Any:
    """The actor in eval mode on `device`: a folder's weights, or random ones of `SEED`."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model_config(workload.model)
    if workload.model not in SHAPES:
        model = AutoModelForCausalLM.from_pretrained(workload.model, local_files_only=True)
        return model.to(device=device, dtype=dtype).eval()
    before = torch.get_default_dtype()
    torch.manual_seed(SEED)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    _vary_answers(model)
    return model.to(dtype).eval()


def _vary_answers(model: Any) -> None:
    """Lets greedy answers of random weights vary; sizes and so times are those of any weights.

    With the usual initialisation the same few tokens win everywhere and a row repeats one of them. Here tokens, and
    positions that have a table, weigh as much in the residual stream as the layers do, and random signs in the last
    norm keep a tied output projection from choosing the token that it has just read.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED + 3)
    norms = [
        module
        for name, module in model.named_modules()
        if "norm" in name.rpartition(".")[2] and "layers." not in name and getattr(module, "weight", None) is not None
    ]
    with torch.no_grad():
        for table in (module for module in model.modules() if isinstance(module, torch.nn.Embedding)):
            table.weight.mul_(25.0)
        for norm in norms[-1:]:
            signs = torch.randint(0, 2, norm.weight.shape, generator=generator).mul_(2).sub_(1)
            norm.weight.mul_(signs.to(norm.weight))


@dataclass(frozen=True)
class Batch:
    """The prompts of one call.

    Attributes:
        ids: int64 `[rows, columns]`, left-padded with `PAD`.
        mask: int64 `[rows, columns]`, 0 where padded.
        ends: end tokens of the call; empty: exactly `new_tokens` a row.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    ends: tuple[int, ...] = ()


def build_batch(
    workload: Workload, vocabulary: int, device: str, rows: int, columns: int | None = None, ends: Sequence[int] = ()
) -> Batch:
    """Random prompts, drawn on the CPU so that every process has the same; no token is special.

    Args:
        workload: decides lengths.
        vocabulary: tokens of the model.
        device: where they go.
        rows: rows of the call.
        columns: fewer than the workload's, for a shorter prompt.
        ends: end tokens.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED + 1)
    ids = torch.randint(_FIRST_DRAWN, vocabulary, (max(rows, 32), workload.prompt_tokens), generator=generator)
    width = columns or workload.prompt_tokens
    ids, mask = ids[:rows, :width].contiguous(), torch.ones(rows, width, dtype=torch.long)
    for row, length in enumerate(workload.prompt_lengths(rows)):
        padded = max(0, width - length)
        ids[row, :padded] = PAD
        mask[row, :padded] = 0
    return Batch(ids.to(device), mask.to(device), tuple(ends))


def end_tokens(workload: Workload, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """End tokens for which the rows of a known greedy answer end at random steps, or near them.

    A step is drawn for each row. Since an end token ends every row that has it, they are chosen together: one after
    another, each the token that brings the rows nearest to their steps, until none brings them nearer.

    Args:
        workload: decides the steps.
        answers: the new tokens of each row, without an end.
    """
    draw = random.Random(SEED + 2)  # noqa: S311 - steps, no secret
    wanted = [draw.randrange(len(row)) for row in answers]
    # By token, the step at which each row has it for the first time; its last step where the row never has it.
    lasts = [len(row) - 1 for row in answers]
    places = [{token: step for step, token in reversed(list(enumerate(row)))} for row in answers]
    firsts = {
        token: [place.get(token, last) for place, last in zip(places, lasts, strict=True)]
        for token in sorted(set().union(*places))
    }

    def distance(ends: list[int]) -> int:
        return sum(abs(end - step) for end, step in zip(ends, wanted, strict=True))

    chosen: set[int] = set()
    while True:
        with_token = {token: list(map(min, lasts, steps)) for token, steps in firsts.items()}
        best = min(with_token, key=lambda token: distance(with_token[token]))
        if chosen and distance(with_token[best]) >= distance(lasts):
            return tuple(sorted(chosen))
        chosen.add(int(best))
        lasts = with_token[best]


def live_tokens(answers: Sequence[Sequence[int]], ends: Sequence[int]) -> int:
    """Tokens that count: in each row up to its first end token and with it."""
    return sum(next((step + 1 for step, token in enumerate(row) if token in ends), len(row)) for row in answers)


def fingerprint(model: Any) -> float:
    """Sum of the absolute weights in float64: equal in two processes that hold the same model."""
    import torch

    with torch.no_grad():
        return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in model.parameters()))


def engine_config(workload: Workload, *, hybrid: bool, **more: Any) -> dict[str, Any]:
    """The DeepSpeed configuration: torch's own AdamW, so that no optimizer op is built.

    Args:
        workload: decides stage, dtype and batch.
        hybrid: whether the engine is a HybridEngine.
        **more: further keys of its section.
    """
    rows = workload.trained_rows
    config: dict[str, Any] = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows,
        "zero_optimization": {"stage": workload.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if workload.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif workload.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if hybrid:
        room = workload.prompt_tokens + workload.new_tokens
        config["hybrid_engine"] = {"enabled": True, "max_out_tokens": room, **more}
    return config


def generate_arguments(new_tokens: int, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Greedy arguments of `generate`.

    Without `ends` a row has exactly `new_tokens`: `min_new_tokens` equals `max_new_tokens`, so the end token stays
    masked.
    """
    arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": PAD}
    if ends:
        return {**arguments, "eos_token_id": list(ends)}
    return {**arguments, "min_new_tokens": new_tokens}
