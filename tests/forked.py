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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SECONDS_PER_CASE = 120


def environment(**more: str | None) -> dict[str, str]:
    """Return this process's environment for a child, without hepatch's variables; None as a value drops one more."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HEPATCH", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"):
        own.pop(name, None)
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    own.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), HEPATCH_COMPILE_BACKEND="eager")
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


def run_all(
    function: str, cases: Sequence[Any], preload: Iterable[str] = (), env: Mapping[str, str | None] | None = None
) -> list[dict[str, Any]]:
    """Call a function once per case.

    Args:
        function: `module:name`; called with one case, returns JSON data.
        cases: JSON data.
        preload: modules that are imported before the first fork.
        env: environment variables, as `environment` takes them.

    Returns:
        For each case `{"result": ...}`, or `{"error": class name, "message": ..., "traceback": ...}`; an exit or a
        signal is an error too.
    """
    order = {"function": function, "cases": list(cases), "preload": list(preload)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.forked"],
        env=environment(**dict(env or {})),
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=_SECONDS_PER_CASE * max(1, len(order["cases"])),
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(f"the forking process failed:\n{done.stderr}")
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def _main() -> None:
    order = json.loads(sys.stdin.read())
    for name in order["preload"]:
        importlib.import_module(name)
    # Or a child's first collection copies every page that it shares with this process.
    gc.freeze()
    results = [_in_child(order["function"], case) for case in order["cases"]]
    sys.stdout.write("\n" + json.dumps(results) + "\n")


def _in_child(function: str, case: Any) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # Only the answer goes to the pipe; what the hosts print goes where the parent's messages go.
        os.dup2(2, 1)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(_answer(function, case)))
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
    _main()
