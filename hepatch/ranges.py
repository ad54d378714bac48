"""Named ranges for profilers: one for a prompt and one for each step, by region and key, while somebody looks.

Whether somebody does is asked once a call and not once a step. `torch.profiler`, and `emit_nvtx` of it, take
`record_function`; Nsight Systems attached from outside takes NVTX ranges. Otherwise nothing is wrapped at all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hepatch import probes, settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hepatch.region import Region
    from hepatch.region_store import RegionKey


def prompt(rows: int, columns: int) -> AbstractContextManager[Any]:
    """A range around the prefill of `rows` prompts of `columns` tokens; nothing where nobody looks."""
    make = _range()
    return contextlib.nullcontext() if make is None else make(f"hepatch::prefill[rows={rows},prompt={columns}]")


def steps(region: Region) -> Callable[[RegionKey], int]:
    """`region.run`, with a range around every step while somebody looks.

    The name is the region's and the key's: `hepatch::decode_step_0[rows=8,window=384]`.
    """
    make = _range()
    if make is None:
        return region.run

    def run(key: RegionKey) -> int:
        sizes = ",".join(f"{name}={value}" for name, value in key._asdict().items())
        with make(f"hepatch::{region.name}[{sizes}]"):
            return region.run(key)

    return run


def _range() -> Callable[[str], AbstractContextManager[Any]] | None:
    if probes.is_profiling():
        return torch.profiler.record_function
    if settings.nvtx_tool() and torch.cuda.is_available():
        return torch.cuda.nvtx.range
    return None
