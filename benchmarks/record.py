"""The recorded workloads of `hepatch bench`: one command runs them and keeps result, table and picture.

`python -m benchmarks.record seed long variable` on a GPU, about four minutes each. Files are named by workload and by
the release of transformers, since that decides which systems can run: `bench-seed-transformers-5.17.json`. What stands
behind `--` goes to `hepatch bench`: `python -m benchmarks.record seed -- --build-op`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hepatch.commands.bench import EXIT_INTERRUPTED

WORKLOADS = ("seed", "long", "variable")
RESULTS = Path(__file__).resolve().parent / "results"


def command(workload: str, folder: Path, more: list[str]) -> list[str]:
    """The command line of one workload, its files in `folder`."""
    release = ".".join(metadata.version("transformers").split(".")[:2])
    stem = folder / f"bench-{workload}-transformers-{release}"
    files = [f"--json={stem}.json", f"--markdown={stem}.md", f"--picture={stem}.png"]
    return [sys.executable, "-m", "hepatch", "bench", "--workload", workload, *more, *files]


def run(words: list[str]) -> int:
    """Runs a command to its end and returns its exit status.

    An interrupt is left to the command, which ends with what it has measured: a terminal sends Ctrl-C to both, a time
    limit may send SIGTERM to this process alone.
    """
    process = subprocess.Popen(words)
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(words: Sequence[str] | None = None) -> int:
    """Runs what was asked for, one after another, until one is interrupted; 1 if one of them had no result."""
    given = list(sys.argv[1:] if words is None else words)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; it is made if missing")
    options, more = parser.parse_args(given[:split]), given[split + 1 :]
    options.out.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in options.workloads:
        codes.append(run(command(name, options.out, more)))
        if codes[-1] == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    return int(any(codes))


if __name__ == "__main__":
    raise SystemExit(main())
