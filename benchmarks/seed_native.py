"""Native regions against the unpatched HybridEngine and transformers' static cache: one script, one run, one JSON file.

Each system lives in a process of its own; timed calls take turns, so that a noisy host hurts all alike. hepatch runs in
two processes: one with an empty compiler cache, then one that finds it filled. Run
`python -m benchmarks.seed_native --help`; README.md beside this explains the fields.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import mixed, summary
from hepatch.bench.client import Place, Stage, Worker
from hepatch.bench.run import in_turn
from hepatch.bench.spread import machine, spread
from hepatch.bench.workload import Workload

FULL = Workload("opt-1.3b")
TINY = Workload("tiny", dtype="fp32", batches=(4,), prompt_tokens=24, new_tokens=12)
NAMES = ("unpatched", "static-cache", "hepatch")
_SYSTEMS = {"hepatch": "native"}
"""Systems whose name in a result is not their key in `hepatch.bench.systems`."""


class Run:
    """One run: its workers, and the result that fills as stages end. A stage that fails leaves the others alone."""

    def __init__(self, workload: Workload, options: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
        self.workload, self.options, self.folder, self.result = workload, options, folder, result
        self.place = Place(options.device, folder, options.timeout, options.build_op)
        self.workers: dict[str, Worker] = {}
        self.cold: Worker | None = None
        self.systems: dict[str, Any] = result["systems"]
        self.started = time.perf_counter()

    def say(self, stage: str, facts: dict[str, Any]) -> None:
        """Prints one line a stage, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {stage}: {json.dumps(facts)}", flush=True)

    def stage(self, name: str) -> Stage:
        """A part whose failure leaves the others alone."""
        return Stage(name, self.result["errors"], self.say)

    def measure(self) -> None:
        """Every stage in order; ends the workers whatever happens."""
        try:
            self.build()
            self.first_calls()
            self.turns()
            with self.stage("tokens"):
                self.judge()
            for name in self.workers:
                with self.stage(f"{name}: iterations"):
                    self.iterate(name)
            if "hepatch" in self.workers:
                with self.stage("mixed calls"):
                    self.mix(self.workers["hepatch"])
            self.look_inside()
        finally:
            for worker in (*self.workers.values(), self.cold):
                if worker:
                    worker.stop()

    def start(self, name: str, tag: str = "") -> Worker:
        """A process of a system; a call that leaves hepatch's region is an error there."""
        return Worker(
            _SYSTEMS.get(name, name),
            self.workload,
            self.place,
            cache=f"{name}-cache",
            tag=tag,
            environment={"HEPATCH_STRICT": "1"},
            commands_of=mixed.Commands,
        )

    def build(self) -> None:
        """All processes build at once; one that fails is left out of what follows."""
        names = self.options.systems
        started = {name: self.start(name) for name in names}
        if "hepatch" in names:
            started["cold"] = self.start("hepatch", tag="cold")
        for worker in started.values():
            worker.send("build")
        weights: set[float] = set()
        versions: dict[str, str] = {}
        for name, worker in started.items():
            with self.stage(f"{name}: build") as stage:
                built = worker.receive()
                weights.add(built.pop("weights"))
                versions |= built.pop("versions")
                self.say(f"{name}: built", built)
                if name == "cold":
                    self.cold = worker
                else:
                    self.workers[name], self.systems[name] = worker, built
            if stage.failed:
                worker.stop()
        self.result |= {"versions": versions, "weights_equal": len(weights) == 1}

    def first_calls(self) -> None:
        """First calls, each process alone on the device: hepatch with an empty compiler cache, then every system."""
        first: dict[str, Any] = {}
        if self.cold:
            with self.stage("hepatch, empty compiler cache"):
                first = self.cold.ask("first_call")
                self.say("hepatch, empty compiler cache", first)
            self.cold.stop()
        for name, worker in list(self.workers.items()):
            system = self.systems[name]
            with self.stage(f"{name}: first call") as stage:
                system |= worker.ask("first_call")
                if name == "hepatch":
                    for key in ("first_call", "second_call", "compile_times"):
                        system[f"{key}_warm_s"] = system.pop(f"{key}_s")
                    system |= first
                for _ in range(2):
                    worker.ask("generate")
                system |= worker.ask("memory")
                self.say(name, {key: value for key, value in system.items() if "compile" not in key})
            if stage.failed:
                del self.workers[name]
                worker.stop()

    def turns(self) -> None:
        """The timed calls: every system once a round, another one first each time."""
        names = list(self.workers)
        if not names:
            return
        times: dict[str, dict[str, list[float]]] = {name: {"generate": [], "prefill": []} for name in names}
        with self.stage("timed calls"):
            for turn in range(self.options.rounds):
                for name in in_turn(names, turn):
                    times[name]["generate"].append(self.workers[name].ask("generate"))
                    times[name]["prefill"].append(self.workers[name].ask("generate", 1))
        for name in names:
            if not times[name]["prefill"]:
                continue
            whole, prefill = spread(times[name]["generate"]), spread(times[name]["prefill"])
            per_step = (whole["median"] - prefill["median"]) / (self.workload.new_tokens - 1)
            fields = {
                "generate_ms": whole["median"],
                "ms_per_step": round(per_step, 4),
                "prefill_ms": prefill["median"],
            }
            self.systems[name] |= {**fields, "generate_spread_ms": whole}
            self.say(f"{name}: generate", {**fields, **whole})

    def judge(self) -> None:
        """Token agreement, before any training: hepatch with the unpatched engine, and each system with itself."""
        twice = {name: [worker.ask("tokens") for _ in range(2)] for name, worker in self.workers.items()}
        self.result["repeat_equal"] = {name: answers[0] == answers[1] for name, answers in twice.items()}
        self.say("equal to itself in a second call", self.result["repeat_equal"])
        if "unpatched" not in twice:
            return
        for name in (name for name in twice if name != "unpatched"):
            verdict = self.workers["unpatched"].ask("compare", twice["unpatched"][0], twice[name][0])
            self.result.setdefault("agreement_with_unpatched", {})[name] = verdict
            self.say(f"{name}: tokens", verdict)
            if name == "hepatch":
                self.result |= {key: verdict[key] for key in ("tokens_equal", "tokens_total")}

    def iterate(self, name: str) -> None:
        """RLHF-shaped iterations; the medians of the whole and its parts."""
        runs = self.workers[name].ask("iterations", self.options.iterations)
        medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        self.systems[name] |= {"iteration_ms": medians["iteration_ms"], "iteration": medians, "iteration_runs": runs}
        self.say(f"{name}: iteration", medians)

    def mix(self, worker: Worker) -> None:
        """The calls of mixed shapes, then hepatch's own report."""
        self.result["mixed"] = worker.ask("mixed", self.options.mixed, self.options.tiny)
        self.say("mixed calls", {key: value for key, value in self.result["mixed"].items() if key != "trace"})
        self.result["report"] = worker.ask("report")
        print(self.result["report"]["text"], flush=True)

    def look_inside(self) -> None:
        """The device's copy rate and the profiles that were asked for."""
        if self.options.device != "cpu" and self.workers:
            with self.stage("copy rate"):
                rate = next(iter(self.workers.values())).ask("copy_rate")
                self.result["copy_tb_per_s"] = round(rate / 1e3, 3)
        for name in self.options.profile:
            if name in self.workers:
                with self.stage(f"{name}: profile"):
                    profile = self.workers[name].ask("profile")
                    self.result.setdefault("profile", {})[name] = profile
                    print("\n".join(profile["host"]))
                    for kernel in profile.get("kernels", []):
                        print(f"{kernel['us_per_step']:9.1f} us {kernel['per_step']:7.1f} x {kernel['name']}")
                    self.say(
                        f"{name}: profile", {key: profile[key] for key in profile if key not in ("kernels", "host")}
                    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where to write the JSON; worker logs go beside it")
    parser.add_argument("--tiny", action="store_true", help="a two-layer model, to try every line of this script")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each system")
    parser.add_argument("--iterations", type=int, default=4, help="measured RLHF iterations of each system")
    parser.add_argument("--mixed", type=int, default=50, help="calls of mixed shapes")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument(
        "--profile", nargs="*", choices=NAMES, default=[], help="systems whose decode step is profiled at the end"
    )
    parser.add_argument("--build-op", action="store_true", help="build DeepSpeed's inference op for `unpatched` (nvcc)")
    parser.add_argument("--timeout", type=float, default=240.0, help="most seconds for one command of a worker")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 if it ran to its end without an error, whatever the targets say."""
    options = parse(arguments)
    workload = TINY if options.tiny else FULL
    result = {
        "command": summary.command("seed_native", arguments),
        "machine": machine(options.device),
    }
    result |= {
        "workload": vars(workload) | {"decoding": "greedy, min_new_tokens = max_new_tokens", "zero_stage": 2},
        "systems": {},
        "errors": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        Run(workload, options, Path(scratch), result).measure()
        logs = {path.name: path.read_text(errors="replace") for path in Path(scratch).glob("*.log")}
    if "copy_tb_per_s" in result:
        summary.bandwidth(workload, result)
    return conclude(result, options.out, logs)


def conclude(result: dict[str, Any], out: Path | None, logs: dict[str, str]) -> int:
    """Prints table and targets, writes the result and the workers' logs; the exit status."""
    summary.finish(result)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        for name, text in logs.items():
            (out.parent / name).write_text(text)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
