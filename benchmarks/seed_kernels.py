"""Kernels regions against the eager HybridEngine and DeepSpeed's own decode graphs: one script, one JSON file.

Needs nvcc and a transformers for whose OPT DeepSpeed builds containers (up to 4.48). First the seed workload at batch
8, with training, then generation alone at batches 1, 4, 16 and 32. Systems take turns, each in a process of its own.
`python -m benchmarks.seed_kernels --help`; README.md beside this explains the fields.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import summary
from hepatch.bench import tables
from hepatch.bench.client import Place
from hepatch.bench.run import Plan, Run
from hepatch.bench.systems import CudaGraph, Kernels, Unpatched
from hepatch.bench.workload import Workload

BATCH, OTHERS = 8, (1, 4, 16, 32)
FULL = Workload("opt-1.3b", batches=(BATCH,))
TINY = Workload("opt-125m", dtype="fp32", batches=(2,), prompt_tokens=24, new_tokens=12)
TINY_OTHERS = (3,)
COLUMNS = (
    "batch",
    "eager, ms per step",
    "hepatch, ms per step",
    "eager, tokens/s",
    "hepatch, tokens/s",
    "generate",
    "tokens equal",
)
SYSTEMS = (Unpatched.name, CudaGraph.name, Kernels.name)


class Shown:
    """Prints what a run is doing, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Around the work that has this title."""
        print(f"[{time.perf_counter() - self._started:6.1f} s] {title}", flush=True)
        yield


def table(result: dict[str, Any]) -> list[str]:
    """Batches as lines of a Markdown table, as the README has it."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    rows = [row for row in (*result["rows"], *result["other_batches"]["rows"]) if row["failure"] is None]
    for ours in sorted((row for row in rows if row["system"] == Kernels.name), key=lambda row: int(row["batch"])):
        eager = next(row for row in rows if row["system"] == Unpatched.name and row["batch"] == ours["batch"])
        cells = (
            str(ours["batch"]),
            f"{eager['ms_per_step']:.2f}",
            f"{ours['ms_per_step']:.2f}",
            f"{eager['tokens_per_s']:.0f}",
            f"{ours['tokens_per_s']:.0f}",
            f"{ours['speed_up']:.2f}x",
            f"{ours['tokens_equal']}/{ours['tokens_total']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What issue 3 asks of the seed workload, and whether it was met.

    Args:
        rows: of batch 8.
    """
    found = {row["system"]: row for row in rows if row["failure"] is None}
    eager, ours = found.get(Unpatched.name, {}), found.get(Kernels.name, {})

    def ratio(key: str) -> float | None:
        return eager[key] / ours[key] if eager.get(key) and ours.get(key) else None

    generate, iteration, train = ratio("generate_ms"), ratio("iteration_ms"), ratio("train_ms")
    first, extra = ours.get("first_call_s"), ours.get("extra_mib")
    tokens = (ours.get("tokens_equal"), ours.get("tokens_total"))
    # A region changes nothing in a training step; a slower one would be a fault, a faster one is noise.
    slower = None if train is None else 1.0 / train - 1.0
    return [
        summary.verdict("generate, over eager", ">= 3.0", generate, generate is not None and generate >= 3.0),
        summary.verdict("iteration, over eager", ">= 2.0", iteration, iteration is not None and iteration >= 2.0),
        summary.verdict("train step, slower by", "<= 0.03", slower, slower is not None and slower <= 0.03),
        summary.verdict("first_call_s: compile, record, answer", "<= 12.0", first, first is not None and first <= 12.0),
        summary.verdict("extra_mib", "<= 132.0", extra, extra is not None and extra <= 132.0),
        summary.verdict("tokens identical", "all", tokens[0], tokens[0] is not None and tokens[0] == tokens[1]),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--tiny", action="store_true", help="a smaller model and short answers, to try every line")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each system")
    parser.add_argument("--iterations", type=int, default=8, help="measured RLHF iterations of each system")
    parser.add_argument("--train-steps", type=int, default=32, help="training steps of each system beside those")
    parser.add_argument("--seconds", type=float, default=160.0, help="limit of the first run, twice the second's")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 if every system was measured but one that fails by itself, whatever the targets say."""
    options = parse(arguments)
    command = summary.command("seed_kernels", arguments)
    seed = TINY if options.tiny else FULL
    sweep = replace(seed, batches=TINY_OTHERS if options.tiny else OTHERS, trains=False)
    step = Shown().step
    with tempfile.TemporaryDirectory() as folder:
        place = Place(options.device, Path(folder), timeout=120.0, build_op=True)
        plan = Plan(
            SYSTEMS,
            rounds=options.rounds,
            iterations=options.iterations,
            seconds=options.seconds,
            train_in_turns=(Unpatched.name, Kernels.name),
            train_steps=options.train_steps,
        )
        result = Run(seed, plan, place, step, command).measure()
        plan = replace(plan, systems=plan.train_in_turns, rounds=3, iterations=0, kernels=False)
        others = Run(sweep, replace(plan, seconds=options.seconds / 2), place, step, command).measure()
    result["other_batches"] = {name: others[name] for name in ("rows", "floor_ms_per_step", "answer_lengths")}
    result["errors"] += others["errors"]
    result["targets"] = targets(result["rows"])
    print(tables.markdown(result))
    print(tables.markdown({**others, "copy_gb_per_s": result.get("copy_gb_per_s")}))
    summary.show(result["targets"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(error["system"] != CudaGraph.name for error in result["errors"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
