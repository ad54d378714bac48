"""The wheel in an environment that knows nothing of the checkout: installed, imported, tried, taken out again."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hepatch

ROOT = Path(__file__).resolve().parents[1]


def built(target: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    return archive


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


class Clean:
    """A virtual environment with pip in it, and the hosts within reach.

    The hosts are gigabytes, so they are used where they are: a line in a path file is a folder to look into, and what
    that folder's own path files say, an editable hepatch among it, is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        site = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        (Path(site) / "hosts.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *arguments: str, program: str = "python", succeeds: bool = True) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEPATCH"))}
        done = subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder,
            env={**own, "HEPATCH_COMPILE_BACKEND": "eager", "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Clean:
    environment = Clean(tmp_path_factory.mktemp("clean"))
    environment.run("-c", "import hepatch", succeeds=False)
    environment.run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return environment


def test_installed_package_is_the_wheels(clean: Clean) -> None:
    """It comes from the environment and not from the checkout, with the version of the sources."""
    code = "import hepatch, importlib.metadata as m; print(hepatch.__file__, hepatch.__version__, m.version('hepatch'))"
    file, *versions = clean.run("-c", code).stdout.split()

    assert Path(file).is_relative_to(clean.folder)
    assert versions == [hepatch.__version__, hepatch.__version__]


def test_demo_runs_from_the_installed_command(clean: Clean) -> None:
    """The whole loop, away from the checkout."""
    told = clean.run("demo", "--tiny", "--new-tokens", "4", "--cycles", "1", program="hepatch").stdout

    assert "Tokens after training: 64 of 64 greedy tokens equal" in told


def test_uninstalling_leaves_nothing(tmp_path: Path, wheel: Path) -> None:
    """No file, no command, no path file."""
    environment = Clean(tmp_path / "clean")
    before = {path for path in environment.folder.rglob("*") if "__pycache__" not in path.parts}
    environment.run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    environment.run("-c", "import hepatch")
    environment.run("-m", "pip", "uninstall", "--quiet", "--yes", "hepatch")
    environment.run("-c", "import hepatch", succeeds=False)

    assert {path for path in environment.folder.rglob("*") if "__pycache__" not in path.parts} - before == set()


def test_sdist_builds_the_same_wheel(tmp_path: Path, wheel: Path) -> None:
    """Every file, byte for byte."""
    sdist = built("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()

    assert contents(built("wheel", source, tmp_path / "again")) == contents(wheel)
