"""One system in one process: obeys commands that come over a pipe, so that the systems' timed calls can take turns."""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hepatch.bench.systems import SYSTEMS, NotServedError, System, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.bench.workload import Workload


class Commands:
    """What the parent may ask for; every method returns plain data."""

    def __init__(self, system: System) -> None:
        from hepatch.bench import memory

        self.system = system
        self.start = memory.Reading(0, 0, 0, 0, 0)
        self.peak_mib = 0.0
        self.latest: list[list[int]] = []

    def build(self) -> dict[str, Any]:
        """Model and engine; the memory reading after it is the floor that `extra_mib` is counted from."""
        from hepatch.bench import floor
        from hepatch.bench.workload import fingerprint

        self.system.build()
        module = self.system.engine.module
        weights = fingerprint(module)
        synchronize(self.system.device)
        return {
            "initialize_s": round(self.system.initialize_s, 2),
            "weights": weights,
            "weight_bytes_per_step": floor.weight_bytes(module),
            "kv_bytes_per_token": self.system.kv_token_bytes(),
            "versions": versions(),
        }

    def use(self, rows: int, ends: tuple[int, ...] = ()) -> None:
        """Sets the batch of what follows."""
        self.system.use(rows, ends)

    def generate(self, new_tokens: int | None = None) -> float:
        """One call of the timed workload in ms, the device idle before and after."""
        from hepatch.bench import memory

        memory.reset_peak()
        synchronize(self.system.device)
        started = time.perf_counter()
        tokens = self.system.rollout(new_tokens)
        synchronize(self.system.device)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if new_tokens is None:
            self.peak_mib = memory.peak()
            self.latest = tokens.tolist()
        return elapsed_ms

    def first_call(self, again: bool = True) -> dict[str, Any]:
        """The process's first generate, and a second if it is asked for: compile and record times."""
        from hepatch.bench import memory, profiling

        memory.settle()
        self.start = memory.read()
        before_s = profiling.compile_s()
        first_s = self.generate() / 1e3
        compile_s = profiling.compile_s() - before_s
        peak = self.peak_mib
        return {
            "first_call_s": round(first_s, 3),
            **({"second_call_s": round(self.generate() / 1e3, 3)} if again else {}),
            "compile_s": round(compile_s, 3),
            "first_call_peak_allocated_mib": round(peak - self.start.allocated, 1),
            "compile_times_s": profiling.compile_times(),
        }

    def memory(self) -> dict[str, Any]:
        """The memory fields: what stays now, and the most within the latest whole call that was timed."""
        from hepatch.bench import memory

        return memory.extra(self.start, memory.read(), self.peak_mib, self.system.cache_mib())  # noqa: S610 - not Django's

    def tokens(self) -> list[list[int]]:
        """Prompt and answer of the timed call."""
        rows: list[list[int]] = self.system.rollout().tolist()
        return rows

    def latest_tokens(self) -> list[list[int]]:
        """Prompt and answer of the latest whole call, without another one."""
        return self.latest

    def compare(self, reference: list[list[int]], candidate: list[list[int]]) -> dict[str, Any]:
        """Token agreement of two answers, judged with this process's weights."""
        import torch

        from hepatch.bench import margins, memory

        tensors = (torch.tensor(rows, device=self.system.device) for rows in (reference, candidate))
        result = margins.compare(self.system.engine.module, self.system.workload, *tensors)
        memory.settle()
        return result

    def iterations(self, count: int, warm_up: bool = True) -> list[dict[str, float]]:
        """`count` RLHF-shaped iterations, after one unmeasured (the optimizer's first step allocates its state)."""
        if warm_up:
            self.system.iteration()
        measured = [self.system.iteration() for _ in range(count)]
        self.system.engine.eval()
        return measured

    def training(self) -> float:
        """ms of one training step on the latest iteration's answer, after a short generate."""
        return self.system.training()

    def state(self) -> dict[str, Any]:
        """What a reader of this system's numbers must know, and where hepatch's region was left."""
        return {"note": self.system.note(), "fallbacks": self.system.fallbacks()}

    def report(self) -> dict[str, Any]:
        """What hepatch reports (hepatch's systems only)."""
        hepatch = sys.modules["hepatch"]
        report = hepatch.report(self.system.engine)
        return {**report.to_dict(), "text": str(report)}

    def kernels(self) -> float | None:
        """Kernels of one decode step."""
        from hepatch.bench import profiling

        return profiling.kernels_per_step(self.system)

    def profile(self) -> dict[str, Any]:
        """Where a step's time goes."""
        from hepatch.bench import profiling

        return profiling.profile_step(self.system)

    def copy_rate(self) -> float:
        """The device's copy bandwidth in GB/s."""
        from hepatch.bench import memory, profiling

        rate = profiling.copy_gb_per_s(self.system.device)
        memory.settle()
        return rate


def versions() -> dict[str, str | None]:
    """What ran, as this process sees it."""
    import deepspeed
    import torch
    import transformers

    found: dict[str, str | None] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }
    found["hepatch"] = sys.modules["hepatch"].__version__
    if torch.cuda.is_available():
        found["triton"] = metadata.version("triton")
    return found


def serve(
    connection: Connection,
    name: str,
    workload: Workload,
    device: str,
    environment: dict[str, str],
    log: Path,
    build_op: bool,
    commands_of: Callable[[System], Commands] = Commands,
) -> None:
    """Entry of the process: answers each `(command, arguments)` with a status and a result.

    The status is "ok", "refused" (the result is a line) or "error" (a traceback).

    Args:
        connection: the child's end; None on it ends the process.
        name: key of `SYSTEMS`.
        workload: of the run.
        device: "cuda" or "cpu".
        environment: set before anything heavy is imported.
        log: where standard output and error go.
        build_op: whether DeepSpeed's op may be built where stock asks for it.
        commands_of: makes what answers; a benchmark may know more commands.
    """
    os.environ.update(environment)
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    commands = commands_of(SYSTEMS[name](workload, device, build_op=build_op))
    while (message := connection.recv()) is not None:
        command, arguments = message
        try:
            connection.send(("ok", getattr(commands, command)(*arguments)))
        except NotServedError as error:
            connection.send(("refused", str(error)))
        except BaseException:  # noqa: BLE001 - whatever it is, an exit included, the parent is told
            connection.send(("error", traceback.format_exc()))
