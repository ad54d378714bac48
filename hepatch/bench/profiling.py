"""Where a decode step's time goes. Numbers for one step are differences between a long and a short call."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hepatch.bench.systems import System


def _kernels(system: System, new_tokens: int | None) -> dict[str, list[float]]:
    """Kernel name to [count, microseconds] over one call."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        system.rollout(new_tokens)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    events: list[FunctionEvent] = list(profiler.events() or [])
    for event in events:
        if event.device_type == DeviceType.CUDA:
            entry = found[event.name]
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us()
    return found


def _wall_ms(system: System, new_tokens: int, repeats: int = 3) -> float:
    from hepatch.bench.systems import synchronize

    times = []
    for _ in range(repeats):
        synchronize(system.device)
        started = time.perf_counter()
        system.rollout(new_tokens)
        synchronize(system.device)
        times.append((time.perf_counter() - started) * 1e3)
    return min(times)


def profile_step(system: System, top: int = 25) -> dict[str, Any]:
    """Kernels and device time per decode step (GPU only), wall time per step, and a whole call's host functions."""
    long, short = system.workload.new_tokens, max(system.workload.new_tokens // 2, 2)
    steps = long - short
    result: dict[str, Any] = {
        "steps": steps,
        "wall_ms_per_step": (_wall_ms(system, long) - _wall_ms(system, short)) / steps,
    }
    if system.device != "cpu":
        many, few = _kernels(system, long), _kernels(system, short)
        rows = []
        for name, (count, microseconds) in many.items():
            earlier = few.get(name, [0, 0.0])
            rows.append((name[:140], (count - earlier[0]) / steps, (microseconds - earlier[1]) / steps))
        rows.sort(key=lambda row: -row[2])
        result["kernels_per_step"] = round(sum(row[1] for row in rows), 1)
        result["kernel_ms_per_step"] = sum(row[2] for row in rows) / 1e3
        result["kernels"] = [
            {"name": name, "per_step": round(count, 2), "us_per_step": round(us, 2)} for name, count, us in rows[:top]
        ]
    host = cProfile.Profile()
    host.enable()
    system.rollout()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    result["host"] = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    return result


def compile_times(top: int = 20) -> dict[str, float]:
    """Seconds that this process spent in the compiler's phases, the longest first; phases contain one another."""
    from torch._dynamo.utils import compilation_time_metrics

    totals = {name: round(sum(seconds), 3) for name, seconds in compilation_time_metrics.items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:top])


def kernels_per_step(system: System) -> float | None:
    """Kernels that a decode step launches or replays: those of a whole call less those of its prompt; None on a CPU."""
    if system.device == "cpu":
        return None
    whole, prompt = (sum(entry[0] for entry in _kernels(system, tokens).values()) for tokens in (None, 1))
    return round((whole - prompt) / max(1, system.columns - 1), 1)


def copy_gb_per_s(device: str) -> float:
    """Copy within the device's memory in GB/s, bytes read plus written, median of nine: the ceiling of a decode step.

    The buffers, 2 GiB on a GPU and 128 MiB on a CPU, are larger than the caches of either.
    """
    import torch

    size = 2**31 if device != "cpu" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(_copy_s(source, target) for _ in range(9)) / 1e9


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    import torch

    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def compile_s() -> float:
    """Seconds that this process has spent in Dynamo and what it calls, Inductor included.

    Source: ``torch._dynamo.utils.compilation_time_metrics``, whose phases contain one another;
    the longest is the whole.
    """
    from torch._dynamo.utils import compilation_time_metrics

    return max((sum(seconds) for seconds in compilation_time_metrics.values()), default=0.0)
