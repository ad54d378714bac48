"""Native regions against the unpatched HybridEngine and transformers' static cache: one script, one run, one JSON file.

Each system lives in a process of its own; timed calls take turns, so that a noisy host hurts all alike. hepatch runs in two processes: one
with an empty compiler cache, then one that finds it filled. Run `python -m benchmarks.seed_native --help`; README.md beside this explains
the fields.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.worker import serve
from benchmarks.workload import FULL, TINY, Workload

NAMES = ("unpatched", "static-cache", "hepatch")


class WorkerError(RuntimeError):
    """A command failed in a worker; the text is the worker's traceback."""


class Worker:
    """The parent's end of one system's process."""

    def __init__(self, name: str, workload: Workload, options: argparse.Namespace, folder: Path, cache: str, tag: str = "") -> None:
        caches = {f"{kind}_CACHE_DIR": str(folder / cache / kind.lower()) for kind in ("TORCHINDUCTOR", "TRITON")}
        environment = {**caches, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port()), "HEPATCH_STRICT": "1", "TOKENIZERS_PARALLELISM": "false"}
        if options.device == "cpu":
            environment["DS_ACCELERATOR"] = "cpu"
        self.label, self.log, self.timeout = f"{name}{tag and f' ({tag})'}", folder / f"{name}{tag and f'-{tag}'}.log", options.timeout
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        arguments = (child, name, workload, options.device, environment, self.log, options.build_op)
        self.process = context.Process(target=serve, args=arguments, daemon=False)
        self.process.start()
        child.close()

    def send(self, command: str, *arguments: Any) -> None:
        """Starts a command without waiting for it."""
        self.pipe.send((command, arguments))

    def receive(self) -> Any:
        """The result of the command sent last. Raises WorkerError if it failed, died, or took too long."""
        if not self.pipe.poll(self.timeout):
            self.process.kill()
            raise WorkerError(f"{self.label}: no answer within {self.timeout} s\n{self.tail()}")
        try:
            status, result = self.pipe.recv()
        except EOFError:
            raise WorkerError(f"{self.label}: the process died\n{self.tail()}") from None
        if status == "error":
            raise WorkerError(f"{self.label}: {result}")
        return result

    def ask(self, command: str, *arguments: Any) -> Any:
        """`send`, then `receive`."""
        self.send(command, *arguments)
        return self.receive()

    def tail(self) -> str:
        """The end of what the process printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:]) if self.log.exists() else ""

    def stop(self) -> None:
        """Ends the process."""
        try:
            self.pipe.send(None)
        except OSError:
            pass
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def free_port() -> int:
    """A TCP port on the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine(device: str) -> dict[str, Any]:
    """Hardware, without names of hosts."""
    found: dict[str, Any] = {"cpu_cores": os.cpu_count(), "architecture": platform.machine(), "device": device}
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return found


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and how many, in ms."""
    return {"median": round(statistics.median(times), 2), "min": round(min(times), 2), "max": round(max(times), 2), "repeats": len(times)}


class Run:
    """One run of the benchmark: its workers, and the result that fills as stages end. A stage that fails leaves the others alone."""

    def __init__(self, workload: Workload, options: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
        self.workload, self.options, self.folder, self.result = workload, options, folder, result
        self.workers: dict[str, Worker] = {}
        self.cold: Worker | None = None
        self.systems: dict[str, Any] = result["systems"]
        self.started = time.perf_counter()

    def say(self, stage: str, facts: dict[str, Any]) -> None:
        """Prints one line a stage, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {stage}: {json.dumps(facts)}", flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Keeps a worker's failure within one stage: it goes into the result, and the script's exit status is 1."""
        try:
            yield
        except WorkerError as error:
            self.result["errors"].append({"stage": name, "error": str(error)})
            self.say(name, {"error": str(error)[-2000:]})

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

    def build(self) -> None:
        """All processes build at once; one that fails is left out of what follows."""
        names = self.options.systems
        started = {name: Worker(name, self.workload, self.options, self.folder, f"{name}-cache") for name in names}
        if "hepatch" in names:
            started["cold"] = Worker("hepatch", self.workload, self.options, self.folder, "hepatch-cache", "cold")
        for worker in started.values():
            worker.send("build")
        weights, versions = set(), {}
        for name, worker in started.items():
            with self.stage(f"{name}: build"):
                built = worker.receive()
                weights.add(built.pop("weights"))
                versions |= built.pop("versions")
                self.say(f"{name}: built", built)
                if name == "cold":
                    self.cold = worker
                    continue
                self.workers[name] = worker
                self.systems[name] = built
                continue
            worker.stop()
        self.result |= {"versions": versions, "weights_equal": len(weights) == 1}

    def first_calls(self) -> None:
        """First and second calls, each process alone on the device: hepatch with an empty compiler cache, then all with theirs."""
        first: dict[str, Any] = {}
        if self.cold:
            with self.stage("hepatch, empty compiler cache"):
                first = self.cold.ask("first_call")
                self.say("hepatch, empty compiler cache", first)
            self.cold.stop()
        for name, worker in list(self.workers.items()):
            system = self.systems[name]
            with self.stage(f"{name}: first call"):
                system |= worker.ask("first_call")
                if name == "hepatch":
                    warm_s, warm_times = system["first_call_s"], system["compile_times_s"]
                    system |= {**first, "first_call_warm_s": warm_s, "compile_times_warm_s": warm_times}
                    if not first:
                        system["first_call_s"] = None
                for _ in range(2):
                    worker.ask("generate")
                system |= worker.ask("memory")
                self.say(name, {key: value for key, value in system.items() if "compile" not in key})
                continue
            del self.workers[name]
            worker.stop()

    def turns(self) -> None:
        """The timed calls: every system once a round, another one first each time."""
        names = list(self.workers)
        times: dict[str, dict[str, list[float]]] = {name: {"generate": [], "prefill": []} for name in names}
        with self.stage("timed calls"):
            for turn in range(self.options.rounds):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    times[name]["generate"].append(self.workers[name].ask("generate"))
                    times[name]["prefill"].append(self.workers[name].ask("generate", 1))
        for name in names:
            if not times[name]["prefill"]:
                continue
            whole, prefill = spread(times[name]["generate"]), spread(times[name]["prefill"])
            per_step = (whole["median"] - prefill["median"]) / (self.workload.new_tokens - 1)
            fields = {"generate_ms": whole["median"], "ms_per_step": round(per_step, 4), "prefill_ms": prefill["median"]}
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
        """hepatch's calls of mixed shapes, then its own report."""
        self.result["mixed"] = worker.ask("mixed", self.options.mixed)
        self.say("mixed calls", {key: value for key, value in self.result["mixed"].items() if key != "trace"})
        self.result["report"] = worker.ask("report")
        print(self.result["report"]["text"], flush=True)

    def look_inside(self) -> None:
        """The device's copy rate and the profiles that were asked for."""
        if self.options.device != "cpu" and self.workers:
            with self.stage("copy rate"):
                self.result["copy_tb_per_s"] = round(next(iter(self.workers.values())).ask("copy_rate"), 3)
        for name in self.options.profile:
            if name in self.workers:
                with self.stage(f"{name}: profile"):
                    profile = self.workers[name].ask("profile")
                    self.result.setdefault("profile", {})[name] = profile
                    print("\n".join(profile["host"]))
                    for kernel in profile.get("kernels", []):
                        print(f"{kernel['us_per_step']:9.1f} us {kernel['per_step']:7.1f} x {kernel['name']}")
                    self.say(f"{name}: profile", {key: profile[key] for key in profile if key not in ("kernels", "host")})


def verdict(name: str, wanted: str, measured: float | bool | None, met: bool) -> dict[str, Any]:
    """One line of the list of targets."""
    return {"name": name, "wanted": wanted, "measured": round(measured, 3) if isinstance(measured, float) else measured, "met": met}


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What issue 2 asks of this run, and whether it was met."""
    systems = result["systems"]
    ours = systems.get("hepatch", {})
    ours_ms = ours.get("generate_ms")
    found = []
    for name, least in (("static-cache", 1.7), ("unpatched", 4.0)):
        theirs_ms = systems.get(name, {}).get("generate_ms")
        ratio = theirs_ms / ours_ms if theirs_ms and ours_ms else None
        found.append(verdict(f"speed-up over {name}", f">= {least}", ratio, ratio is not None and ratio >= least))
    for key, most in (("first_call_s", 30.0), ("first_call_warm_s", 8.0), ("extra_mib", 132.0)):
        value = ours.get(key)
        found.append(verdict(key, f"<= {most}", value, value is not None and value <= most))
    ties = result.get("agreement_with_unpatched", {}).get("hepatch", {}).get("all_differences_are_ties")
    found.append(verdict("tokens equal but for ties", "true", ties, bool(ties)))
    flat = result.get("mixed", {}).get("flat")
    found.append(verdict("flat over mixed calls", "true", flat, bool(flat)))
    return found


def bandwidth(workload: Workload, result: dict[str, Any]) -> None:
    """The least time of a step, from the bytes it must read at the measured copy rate, and each system's share of it."""
    layer = 4 * workload.hidden_size**2 + 2 * workload.hidden_size * workload.ffn_dim
    weights = 2 * (workload.layers * layer + workload.vocab_size * workload.hidden_size)
    kv = workload.kv_mib * 2**20 * (workload.prompt_tokens + workload.new_tokens / 2) / (workload.prompt_tokens + workload.new_tokens)
    floor_ms = (weights + kv) / result["copy_tb_per_s"] / 1e9
    result["floor_ms_per_step"] = round(floor_ms, 3)
    for system in (system for system in result["systems"].values() if "ms_per_step" in system):
        system["share_of_floor"] = round(floor_ms / system["ms_per_step"], 3)


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
    parser.add_argument("--profile", nargs="*", choices=NAMES, default=[], help="systems whose decode step is profiled at the end")
    parser.add_argument("--build-op", action="store_true", help="let the unpatched engine build DeepSpeed's inference op (nvcc, a minute)")
    parser.add_argument("--timeout", type=float, default=240.0, help="most seconds for one command of a worker")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 if it ran to its end without an error, whatever the targets say."""
    options = parse(arguments)
    workload = TINY if options.tiny else FULL
    shown = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in shown:
        del shown[shown.index("--out") : shown.index("--out") + 2]
    result: dict[str, Any] = {"command": " ".join(["python -m benchmarks.seed_native", *shown]), "machine": machine(options.device)}
    result |= {"workload": vars(workload) | {"decoding": "greedy, min_new_tokens = max_new_tokens", "zero_stage": 2}, "systems": {}, "errors": []}
    with tempfile.TemporaryDirectory() as scratch:
        Run(workload, options, Path(scratch), result).measure()
        logs = {path.name: path.read_text(errors="replace") for path in Path(scratch).glob("*.log")}
    if "copy_tb_per_s" in result:
        bandwidth(workload, result)
    result["targets"] = targets(result)
    for target in result["targets"]:
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['name']}: {target['measured']} (wanted {target['wanted']})")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        for name, text in logs.items():
            (options.out.parent / name).write_text(text)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
