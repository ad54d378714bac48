"""Times of repeats and the machine they were taken on, as every result has them."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and how many, in ms."""
    return {
        "median": round(statistics.median(times), 2),
        "min": round(min(times), 2),
        "max": round(max(times), 2),
        "repeats": len(times),
    }


def machine(device: str) -> dict[str, Any]:
    """Hardware, without names of hosts."""
    found: dict[str, Any] = {"cpu_cores": os.cpu_count(), "architecture": platform.machine(), "device": device}
    query = shutil.which("nvidia-smi")
    if device != "cpu" and query is not None:
        command = [query, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
        found["gpus"] = done.stdout.strip().splitlines()
    return found
