"""Releases side by side: one folder a release, put first on the path of the processes of a cell.

Nothing is installed over anything: the environment that runs the matrix stays as it is, and a release that it has
already is used from there. A folder is complete or absent, so an interrupted installation is simply done again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from matrix.pairs import COMPANIONS, NEWEST, Pair

ROOT = Path(__file__).resolve().parents[1]


class InstallError(Exception):
    """A release could not be installed; the message has the installer's last line."""


def folder() -> Path:
    """Where releases and their caches lie: `build/matrix`, or what `MATRIX_HOSTS` says."""
    return Path(os.environ.get("MATRIX_HOSTS", ROOT / "build" / "matrix"))


def environment(pair: Pair) -> dict[str, str]:
    """The environment of a cell's processes, with its releases first on the path; installs what is not there yet.

    Raises:
        InstallError: a release does not install.
    """
    wanted = {"torch": pair.torch, "deepspeed": pair.deepspeed, "transformers": pair.transformers}
    wanted |= COMPANIONS.get(pair.transformers, {})
    places = [str(place) for name, version in wanted.items() if (place := _place(name, version)) is not None]
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEPATCH")}
    return {
        **own,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *places]),
        "PYTHONDONTWRITEBYTECODE": "",
        "DS_ACCELERATOR": "cpu",
        # Two threads on tiny models only wait for each other.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # DeepSpeed names what it compiles by operator alone: two releases in one folder rebuild over each other.
        "TORCH_EXTENSIONS_DIR": str(folder() / "torch-extensions" / pair.name),
    }


def are_installed(pair: Pair) -> bool:
    """Whether the running environment has the very releases of a pair."""
    return all(_installed(name) == version for name, version in vars(pair).items())


def resolved(pair: Pair) -> Pair:
    """The pair with `newest` replaced by the version that the package index has last.

    Raises:
        InstallError: the index does not answer.
    """
    versions = {
        name: _newest(name) if given == NEWEST else given
        for name, given in (("deepspeed", pair.deepspeed), ("transformers", pair.transformers))
    }
    return Pair(versions["deepspeed"], versions["transformers"], pair.torch)


def _place(name: str, version: str) -> Path | None:
    """The folder of a release, filled now if it is not there; None where the running environment has it."""
    if _installed(name) == version:
        return None
    place = folder() / f"{name}-{version}"
    if not place.is_dir():
        unfinished = place.with_name(f"{place.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished), f"{name}=={version}"]
        # torch brings libraries of its own; of the others only the release itself is wanted. The setup script of
        # DeepSpeed imports torch, which an isolated build would fetch again.
        command += [] if name == "torch" else ["--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise InstallError(f"{name} {version} does not install: {(done.stderr.strip() or '?').splitlines()[-1]}")
        unfinished.rename(place)
    return place


def _installed(name: str) -> str | None:
    """The version in the running environment, without the label of its build; None where there is none."""
    own = [entry for entry in sys.path if not entry.startswith(str(folder()))]
    found = next(iter(metadata.distributions(name=name, path=own)), None)
    return None if found is None else found.version.partition("+")[0]


def _newest(name: str) -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"the package index does not say which {name} is newest: {done.stderr.strip()[-200:]}")
    # Newest first, pre-releases left out.
    return str(json.loads(done.stdout)["versions"][0])
