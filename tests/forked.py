"""Run a function once per case, each time in a process of its own that starts from the same prepared state.

One fresh interpreter imports what all cases share, then forks for each of them: the cases see nothing of each other,
and the imports are paid once.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SECONDS_PER_CASE = 120
_MARK = "answer: "


def environment(**more: str | None) -> dict[str, str]:
    """Return this process's environment for a child, without hepatch's variables; None as a value drops one more."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HEPATCH", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"):
        own.pop(name, None)
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    # What is on the path already may be other releases of the hosts: the version matrix puts them there.
    path = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]))
    own.update(OMP_NUM_THREADS="1", PYTHONPATH=path, HEPATCH_COMPILE_BACKEND="eager")
    for name, value in more.items():
        if value is None:
            own.pop(name, None)
        else:
            own[name] = value
    return own


def run_python(code: str, timeout: float = _SECONDS_PER_CASE, **more: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; `more` are environment variables as in `environment`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
    )


class Forks:
    """A prepared interpreter that forks one child for each call; a context manager that ends it.

    Args:
        preload: modules that it imports before the first fork.
        env: its environment variables, as `environment` takes them.
    """

    def __init__(self, preload: Iterable[str] = (), env: Mapping[str, str | None] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *preload],
            env=environment(**dict(env or {})),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_SECONDS_PER_CASE)

    def run(self, function: str, case: Any, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Call a function in a child.

        Args:
            function: `module:name`; called with the case, returns JSON data.
            case: JSON data.
            env: environment variables of this child alone, set before the function's module is imported.

        Returns:
            `{"result": ...}`, or `{"error": class name, "message": ..., "traceback": ...}`; an exit or a signal is an
            error too.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"function": function, "case": case, "env": dict(env or {})}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line[len(_MARK) :])
                return answer
        raise RuntimeError(f"the forking process ended with {self._process.wait()}")


def _main(preload: Iterable[str]) -> None:
    for name in preload:
        importlib.import_module(name)
    # Or a child's first collection copies every page that it shares with this process.
    gc.freeze()
    for line in sys.stdin:
        sys.stdout.write(_MARK + json.dumps(_in_child(json.loads(line))) + "\n")
        sys.stdout.flush()


def _in_child(order: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # Only the answer is the parent's; what the hosts print goes where messages go.
        os.dup2(2, 1)
        os.environ.update(order["env"])
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(_answer(order["function"], order["case"])))
        os._exit(0)
    os.close(writer)
    text = _read(reader, child)
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "Died", "message": f"wait status {status}", "traceback": ""}


def _answer(function: str, case: Any) -> dict[str, Any]:
    try:
        module, name = function.split(":")
        return {"result": getattr(importlib.import_module(module), name)(case)}
    except BaseException as error:  # noqa: BLE001 - SystemExit is what some hosts answer with
        return {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}


def _read(reader: int, child: int) -> str:
    chunks = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], _SECONDS_PER_CASE)[0]:
            chunk = pipe.read(65536)
            if not chunk:
                return b"".join(chunks).decode()
            chunks.append(chunk)
    os.kill(child, signal.SIGKILL)
    return ""


if __name__ == "__main__":
    _main(sys.argv[1:])
