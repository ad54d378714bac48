"""Regressions by ratio: two systems of one run against each other, so that a slow or busy machine hurts both.

`pytest benchmarks` on a GPU takes OPT-1.3b at batch 8, elsewhere the tiny model. pytest-benchmark times the calls
of both and compares runs (`--benchmark-save`, `--benchmark-compare`); the ratio is held against the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hepatch.bench.client import Place, Worker
from hepatch.bench.workload import Workload

RECORDED = Path(__file__).resolve().parent / "results" / "seed-native.json"
CUDA = torch.cuda.is_available()
TINY = Workload("tiny", dtype="fp32", batches=(3,), prompt_tokens=24, new_tokens=12)
WORKLOAD = Workload("opt-1.3b") if CUDA else TINY
# Between two runs on one machine the ratios of the recorded benchmark were within a tenth of each other.
ALLOWED = 0.8
NAMES = ("static-cache", "native") if CUDA else ("unpatched", "native")

_medians_ms: dict[str, float] = {}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """One process for each system, warmed up."""
    place = Place("cuda" if CUDA else "cpu", tmp_path_factory.mktemp("ratios"), warm_caches=True)
    started = {name: Worker(name, WORKLOAD, place) for name in NAMES}
    for worker in started.values():
        worker.send("build")
    for worker in started.values():
        worker.receive()
        worker.ask("first_call")
    yield started
    for worker in started.values():
        worker.stop()


@pytest.mark.parametrize("name", NAMES)
def test_generate(benchmark: Any, workers: dict[str, Worker], name: str) -> None:
    """Time of a whole call, with the pipe's fraction of a millisecond."""
    benchmark.pedantic(workers[name].ask, args=("generate",), rounds=7, warmup_rounds=1)

    _medians_ms[name] = benchmark.stats.stats.median * 1e3


@pytest.mark.skipif(not CUDA, reason="ratios of a CPU are not recorded")
def test_native_is_as_much_faster_as_recorded() -> None:
    """A tenth of noise is expected, a fifth is a regression."""
    systems = json.loads(RECORDED.read_text(encoding="utf-8"))["systems"]
    recorded = systems["static-cache"]["generate_ms"] / systems["hepatch"]["generate_ms"]

    assert _medians_ms["static-cache"] / _medians_ms["native"] >= ALLOWED * recorded


def test_no_timed_call_fell_back(workers: dict[str, Worker]) -> None:
    """Or its time would be another path's."""
    assert workers["native"].ask("state")["fallbacks"] == []
