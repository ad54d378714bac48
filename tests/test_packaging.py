"""What is built from the checkout is what a user gets: the wheel, its metadata, and the pins beside it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hepatch

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "deepspeed", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_has_every_source_and_the_typed_marker(wheel: zipfile.ZipFile) -> None:
    """A flat layout hides a file that the build forgets."""
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hepatch").rglob("*.py")} | {"hepatch/py.typed"}

    assert sources == {name for name in wheel.namelist() if name.startswith("hepatch/")}


def test_wheel_has_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))

    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert "hepatch = hepatch.commands:app" in wheel.read(points).decode()


def test_wheel_runs_from_a_folder_and_its_commands_load_no_torch(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """`hepatch --help` answers at once, because a command loads what it needs when it runs."""
    wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hepatch.commands;"
        f"print(hepatch.__file__, [name for name in {HEAVY} if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], cwd=tmp_path, check=True, capture_output=True, text=True
    )

    assert f"{tmp_path}/hepatch/__init__.py []" == done.stdout.strip()


def test_version_has_one_place(metadata: Message) -> None:
    assert hepatch.__version__ == metadata["Version"]


def test_hosts_have_floors_and_no_ceilings(metadata: Message) -> None:
    """A release of the future is probed when it is loaded, not forbidden when it is installed."""
    required = {
        match[1]: match[2]
        for line in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in line and (match := re.match(r"([a-z-]+)(.*)", line))
    }

    assert set(HEAVY) <= set(required)
    assert all(re.fullmatch(r">=[0-9.]+", specifier) for specifier in required.values()), required


def test_every_required_package_is_pinned(metadata: Message) -> None:
    """What `make` installs is repeatable."""
    pins = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    required = {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in metadata.get_all("Requires-Dist", [])}

    assert set() == required - pins


def test_ci_runs_what_a_developer_runs() -> None:
    """One definition of lint, test and the matrix, in the Makefile."""
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    assert {"make lint test test-kernels", "make matrix-ci"} <= set(script.read_text().splitlines())
