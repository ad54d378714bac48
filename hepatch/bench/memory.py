"""Device memory as the benchmarks count it, in MiB.

Two figures of what generating takes beyond weights and KV cache, both from allocations since the reading before the
process's first generate, and both with what CUDA graph pools reserve and have not allocated:

* `extra_mib`, what stays between warm calls: buffers, workspaces, everything graphs keep;
* `peak_extra_mib`, the most within a warm call: prompt activations as well.

What lies outside torch's allocator (loaded kernels, instantiated graphs, library handles) is `outside_mib`: device
memory in use beyond the start, less what the allocator reserved since; it is shown apart, because eager runs load
kernels too.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """Device memory at one moment."""

    allocated: float
    reserved: float
    pool_reserved: float  # segments of private pools: CUDA graphs
    pool_allocated: float
    used: float  # by every process on the device


def read() -> Reading:
    """The current state; zeros without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return Reading(0, 0, 0, 0, 0)
    torch.cuda.synchronize()
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    free, total = torch.cuda.mem_get_info()
    return Reading(
        allocated=torch.cuda.memory_allocated() / MIB,
        reserved=torch.cuda.memory_reserved() / MIB,
        pool_reserved=sum(segment["total_size"] for segment in pools) / MIB,
        pool_allocated=sum(segment["allocated_size"] for segment in pools) / MIB,
        used=(total - free) / MIB,
    )


def settle() -> None:
    """Gives back what garbage and the allocator's cache hold, so that a start reading is a floor."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reset_peak() -> None:
    """Starts a new peak."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    """Most MiB allocated since `reset_peak`."""
    import torch

    return torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0.0


def extra(start: Reading, now: Reading, peak_mib: float, kv_mib: float) -> dict[str, Any]:
    """The memory fields of a system.

    Args:
        start: before the process's first generate.
        now: after a warmed-up call.
        peak_mib: most allocated within that call.
        kv_mib: KV cache that the call used.
    """
    idle_in_pools = now.pool_reserved - now.pool_allocated
    held_mib = round(now.allocated - start.allocated + idle_in_pools, 1)
    return {
        **between_calls(held_mib, round(kv_mib, 1)),
        "peak_extra_mib": round(peak_mib - start.allocated + idle_in_pools - kv_mib, 1),
        "held_between_calls_mib": held_mib,
        "kv_mib": round(kv_mib, 1),
        "graph_pool_mib": round(now.pool_reserved, 1),
        "peak_allocated_mib": round(peak_mib - start.allocated, 1),
        "reserved_growth_mib": round(now.reserved - start.reserved, 1),
        "outside_mib": round((now.used - start.used) - (now.reserved - start.reserved), 1),
    }


def between_calls(held_mib: float, kv_mib: float) -> dict[str, float]:
    """What stays between calls beyond the KV cache.

    Whether the KV cache stays too is read off the measurement, by one rule for every system: less held than the cache
    is large, and it is not among it.

    Args:
        held_mib: all that stays, `held_between_calls_mib`.
        kv_mib: KV cache that a call used.
    """
    kv_held_mib = kv_mib if held_mib >= kv_mib else 0.0
    return {"extra_mib": round(held_mib - kv_held_mib, 1), "kv_held_mib": kv_held_mib}
