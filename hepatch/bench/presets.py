"""The workloads that are recorded, and what is checked before any process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hepatch.bench.systems import SYSTEMS
from hepatch.bench.workload import DTYPES, Workload, model_config

_RECORDED: dict[str, dict[str, Any]] = {
    # The workload of benchmarks/results/seed-native.json, at five batches.
    "seed": {"batches": (1, 4, 8, 16, 32), "prompt_tokens": 256, "new_tokens": 128},
    # Long prompts and long answers: the KV cache is read as much as the weights are.
    # A training step of it would need 60 GB of activations: its row has no iteration.
    "long": {"batches": (8,), "prompt_tokens": 1024, "new_tokens": 1024, "trains": False},
    # What an RLHF batch looks like: no two rows are alike, and rows end on their own.
    "variable": {
        "batches": (8, 32),
        "prompt_tokens": 512,
        "shortest_prompt": 32,
        "new_tokens": 256,
        "early_ends": True,
    },
}
PRESETS = (*_RECORDED, "tiny")


def preset(name: str, given: Workload) -> Workload:
    """A workload by name; model, dtype and ZeRO stage stay as given, but for "tiny".

    Raises:
        ValueError: there is none of this name.
    """
    if name == "tiny":
        return replace(given, model="tiny", dtype="fp32", batches=(2, 3), prompt_tokens=24, new_tokens=12)
    if name not in _RECORDED:
        raise ValueError(f"--workload {name} is none of {', '.join(_RECORDED)}")
    return replace(given, **_RECORDED[name])


def default_device() -> str:
    """The name of torch's device: "cuda" where there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check(workload: Workload, device: str, systems: tuple[str, ...]) -> None:
    """Looks at everything that can be wrong with the input.

    Raises:
        ValueError: what, why, and what would do.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device {device} is neither cuda nor cpu")
    if device == "cuda" and default_device() != "cuda":
        raise ValueError("--device cuda: torch finds no CUDA device; leave the option out to run on the CPU")
    if workload.dtype not in DTYPES:
        raise ValueError(f"--dtype {workload.dtype} is none of {', '.join(DTYPES)}")
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"--system {unknown[0]} is none of {', '.join(SYSTEMS)}")
    if device == "cpu" and workload.dtype == "fp16":
        raise ValueError("--dtype fp16: DeepSpeed refuses fp16 on most CPUs; use fp32 or bf16 there")
    shortest = workload.shortest_prompt
    if shortest is not None and shortest > workload.prompt_tokens:
        raise ValueError(f"--shortest-prompt {shortest} is longer than --prompt {workload.prompt_tokens}")
    config = model_config(workload.model).get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    wanted = workload.prompt_tokens + workload.new_tokens
    if positions and wanted > positions:
        raise ValueError(f"prompt and new tokens come to {wanted} and {workload.model_name} has {positions} positions")


def check_writable(path: Path) -> None:
    """Raises ValueError where a result could not be written: better now than after the run."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
