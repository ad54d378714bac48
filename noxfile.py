"""The version matrix as sessions: `nox --list` names them, `make matrix` runs all, `.ci/run` those with the tag `ci`.

What they record becomes the table of the README by `python -m matrix.table`.

A session is one pair of real releases. They lie in folders of their own, which are filled once and put on the path of
the session's processes (`matrix.hosts`), so that no session needs an environment built for it and none changes another.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

# nox loads this file by its path, and its folder is on no other.
sys.path.insert(0, str(Path(__file__).parent))

from matrix import hosts
from matrix.pairs import IN_CI, NEWEST_PAIR, PAIRS, WITH_CONTAINERS, Pair

nox.options.default_venv_backend = "none"


def tags(pair: Pair) -> list[str]:
    """Names by which cells are chosen: `--tags transformers-4.57.6`, `--tags ci`."""
    return [f"deepspeed-{pair.deepspeed}", f"transformers-{pair.transformers}", *(["ci"] if pair in IN_CI else [])]


CELLS = [nox.param(pair, id=pair.name, tags=tags(pair)) for pair in (*PAIRS, NEWEST_PAIR)]


@nox.session
@nox.parametrize("pair", CELLS)
def matrix(session: nox.Session, pair: Pair) -> None:
    """Run one pair and record what came out; `-- --check` compares with the record instead."""
    versions = [pair.deepspeed, pair.transformers, "--torch", pair.torch]
    session.run(sys.executable, "-m", "matrix.cell", *versions, *session.posargs, external=True)


@nox.session
@nox.parametrize(
    "pair",
    [
        nox.param(pair, id=pair.name, tags=["containers"] if index == 0 else [])
        for index, pair in enumerate(WITH_CONTAINERS)
    ],
)
def kernels(session: nox.Session, pair: Pair) -> None:
    """The tests of DeepSpeed's containers, with its own torch fallbacks, on a pair whose containers work."""
    command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--timeout", "600"]
    session.run(*command, "tests/kernels", *session.posargs, env=hosts.environment(pair), external=True)
