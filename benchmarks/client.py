"""The parent's end of the systems' processes."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.worker import serve
from benchmarks.workload import Workload


class WorkerError(RuntimeError):
    """A command failed in a worker; the text is the worker's traceback."""


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


class Worker:
    """The parent's end of one system's process."""

    def __init__(
        self, name: str, workload: Workload, options: argparse.Namespace, folder: Path, *, cache: str, tag: str = ""
    ) -> None:
        caches = {f"{kind}_CACHE_DIR": str(folder / cache / kind.lower()) for kind in ("TORCHINDUCTOR", "TRITON")}
        environment = {**caches, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port()), "HEPATCH_STRICT": "1", "TOKENIZERS_PARALLELISM": "false"}
        if options.device == "cpu":
            environment["DS_ACCELERATOR"] = "cpu"
        self.label = f"{name} ({tag})" if tag else name
        self.log = folder / f"{name}{'-' if tag else ''}{tag}.log"
        self.timeout = options.timeout
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        arguments = (child, name, workload, options.device, environment, self.log, options.build_op)
        self.process = context.Process(target=serve, args=arguments, daemon=False)
        self.process.start()
        child.close()

    def send(self, command: str, *arguments: Any) -> None:
        """Starts a command without waiting for it. Raises WorkerError if the process is gone."""
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise WorkerError(f"{self.label}: the process is gone ({error})\n{self.tail()}") from None

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
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def free_port() -> int:
    """A TCP port on the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
