"""The parent's end of the systems' processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hepatch.bench.systems import SYSTEMS
from hepatch.bench.worker import Commands, serve
from hepatch.bench.workload import Workload


class WorkerError(RuntimeError):
    """A command failed in a worker.

    Attributes:
        line: what failed, in one line.
    """

    def __init__(self, label: str, text: str, line: str | None = None) -> None:
        super().__init__(f"{label}: {text}")
        self.line = line or last_line(text)


def last_line(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    # A traceback's last paragraph may explain itself over several lines; its first one names the error.
    named = [line for line in lines if ": " in line and line.split(":")[0].replace(".", "").isidentifier()]
    return (named or lines or ["no message"])[-1]


def without_folders(text: str) -> str:
    """A traceback with the names of files alone: a result names no folder of the machine it was made on."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", text)


class Stage:
    """Keeps a worker's failure within one part of the run: it goes into the result, and the exit status will be 1."""

    def __init__(self, name: str, errors: list[dict[str, str]], say: Callable[[str, dict[str, Any]], None]) -> None:
        self.name, self.failed = name, False
        self._errors, self._say = errors, say

    def __enter__(self) -> Stage:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, WorkerError):
            return False
        self.failed = True
        self._errors.append({"stage": self.name, "error": str(error)})
        self._say(self.name, {"error": str(error)[-2000:]})
        return True


@dataclass(frozen=True)
class Place:
    """Where workers run.

    Attributes:
        device: "cuda" or "cpu".
        folder: holds their logs and compiler caches.
        timeout: most seconds for one command.
        build_op: whether DeepSpeed's op may be built where stock asks for it.
        warm_caches: leave the compilers' caches where the environment has them, instead of empty ones in `folder`.
    """

    device: str
    folder: Path
    timeout: float = 240.0
    build_op: bool = False
    warm_caches: bool = False


class Worker:
    """The parent's end of one system's process.

    Args:
        name: key of `SYSTEMS`.
        workload: of the run.
        place: where it runs.
        cache: folder name of its compiler caches, below the place's.
        tag: told apart by, where a system has two processes.
        environment: more variables.
        commands_of: see `serve`.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        place: Place,
        *,
        cache: str = "",
        tag: str = "",
        environment: Mapping[str, str] | None = None,
        commands_of: Callable[..., Commands] = Commands,
    ) -> None:
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": str(free_port()), "TOKENIZERS_PARALLELISM": "false"}
        if not place.warm_caches:
            folder = place.folder / (cache or f"{name}-cache")
            own |= {f"{kind}_CACHE_DIR": str(folder / kind.lower()) for kind in ("TORCHINDUCTOR", "TRITON")}
        if place.device == "cpu":
            # Threads that wait by spinning would take the cores from the process whose turn it is.
            own |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
        own |= {**SYSTEMS[name].environment, **(environment or {})}
        self.label = f"{name} ({tag})" if tag else name
        self.log = place.folder / f"{name}{'-' if tag else ''}{tag}.log"
        self.timeout = place.timeout
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        arguments = (child, name, workload, place.device, own, self.log, place.build_op, commands_of)
        self.process = context.Process(target=serve, args=arguments, daemon=False)
        self.process.start()
        child.close()

    def send(self, command: str, *arguments: Any) -> None:
        """Starts a command without waiting for it. Raises WorkerError if the process is gone."""
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise WorkerError(self.label, f"the process is gone ({error})\n{self.tail()}", "its process died") from None

    def receive(self, timeout: float | None = None) -> Any:
        """The result of the command sent last. Raises WorkerError if it failed, died, or took too long."""
        patience_s = timeout or self.timeout
        if not self.pipe.poll(patience_s):
            self.process.kill()
            late = f"no answer within {patience_s:.0f} s"
            raise WorkerError(self.label, f"{late}\n{self.tail()}", late)
        try:
            status, result = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(self.label, f"the process died\n{self.tail()}", "its process died") from None
        if status == "refused":
            raise WorkerError(self.label, result, result)
        if status == "error":
            raise WorkerError(self.label, result)
        return result

    def ask(self, command: str, *arguments: Any) -> Any:
        """`send`, then `receive`."""
        self.send(command, *arguments)
        return self.receive()

    def tail(self) -> str:
        """The end of what the process printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:]) if self.log.exists() else ""

    def stop(self, patience_s: float = 20.0) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def free_port() -> int:
    """A TCP port on the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remaining(deadline: float) -> float:
    """Seconds until a moment of `time.monotonic`."""
    return deadline - time.monotonic()
