"""What the README says of the package is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hepatch import settings
from hepatch.guards import GUARDS, Guard

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows_between(name: str) -> list[list[str]]:
    """The cells of each row of the table between `<!-- name -->` and `<!-- /name -->`, without its head."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, flags=re.DOTALL)
    assert found is not None
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def plain(text: str) -> str:
    return text.replace("`", "")


def spelled(default: object) -> str:
    """A default as one would write it into the environment."""
    if default is None:
        return "no limit"
    return str(int(default)) if isinstance(default, bool) else str(default)


def test_every_guard_is_in_the_table_in_reading_order() -> None:
    """A rule that a log line names can be looked up."""
    assert [guard.rule for guard in GUARDS] == [plain(row[0]) for row in rows_between("guards")]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.rule)
def test_a_guards_row_has_a_reason_and_the_remedy_that_is_logged(guard: Guard) -> None:
    """A remedy that depends on the facts is told in words of the README's own."""
    _, reason, remedy = next(row for row in rows_between("guards") if plain(row[0]) == guard.rule)

    assert reason
    assert remedy
    if isinstance(guard.remedy, str):
        assert guard.remedy == plain(remedy)


def test_every_guard_is_in_the_changelog() -> None:
    """Adding or renaming a rule is an entry of its own."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert [] == [guard.rule for guard in GUARDS if f"`{guard.rule}`" not in changelog]


def test_every_setting_is_in_the_table_with_its_default() -> None:
    """The table is complete and its defaults are the package's."""
    defaults = {
        settings.variable_of(name): spelled(field.default) for name, field in settings.Settings.model_fields.items()
    }

    assert defaults == {plain(variable): plain(default) for variable, default, _, _ in rows_between("settings")}


def test_the_commands_of_the_readme_are_targets_of_make() -> None:
    """No `make` command is named that make does not know."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))

    named = "demo|bench|doctor|test|test-kernels|matrix|lint|format|clean|install"
    assert set(re.findall(rf"\bmake ({named})\b", README)) <= targets


def test_the_tested_versions_are_the_pinned_ones() -> None:
    """The CPU row of the versions table is constraints.txt."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )

    row = next(line for line in README.splitlines() if line.startswith("| tests, CPU"))

    expected = [pins[name] for name in ("torch", "deepspeed", "transformers")]
    assert expected == [cell.strip() for cell in row.strip("|").split("|")][1:4]


def test_troubleshooting_is_in_the_doctors_words() -> None:
    """What the table quotes is what the doctor prints, letter for letter."""
    package = Path(settings.__file__).parent
    source = " ".join(
        path.read_text(encoding="utf-8") for folder in ("doctor", ".") for path in (package / folder).glob("*.py")
    )
    rows = rows_between("doctor")

    assert rows
    assert [] == [plain(row[0]) for row in rows if plain(row[0]) not in source]


def test_every_command_of_the_readme_exists_with_its_options() -> None:
    """`hepatch doctor --config ...`: the command line knows each word."""
    from typer.main import get_command

    from hepatch.commands import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^hepatch ([a-z]+)(.*)$", "".join(blocks), flags=re.MULTILINE)

    assert {"doctor", "bench"} <= {name for name, _ in lines}
    for name, rest in lines:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest.split("#")[0])) <= known
