"""The compatibility table of the README, made from the recorded results: `python -m matrix.table [--check]`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from matrix import results
from matrix.cell import CASES
from matrix.hosts import ROOT
from matrix.pairs import TORCH

README = ROOT / "README.md"
START, END = "<!-- compatibility -->", "<!-- /compatibility -->"
NAMES = {"opt": "OPT", "llama": "Llama", "gpt_neox": "GPT-NeoX", "bloom": "Bloom", "qwen2": "Qwen2"}

Record = dict[str, Any]


def render(recorded: Mapping[str, Record]) -> str:
    """The table and what belongs to it, without the marks around it."""
    outcomes = _numbered(recorded.values())
    lines = ["| DeepSpeed | transformers | stock | hepatch's backend | verified models |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_row(record, outcomes))} |" for record in recorded.values()]
    lines += ["", "What stock does, in the first step that goes wrong:", ""]
    lines += [f"{number}. {_told(outcome)}" for outcome, number in outcomes.items()]
    lines += ["", _summary(recorded)]
    return "\n".join(lines)


def written(readme: str, recorded: Mapping[str, Record]) -> str:
    """The README with the table in its place.

    Raises:
        ValueError: the README has no place for it.
    """
    if START not in readme or END not in readme:
        raise ValueError(f"the README has no {START} and {END}: put them where the table belongs")
    before, _, rest = readme.partition(START)
    return f"{before}{START}\n{render(recorded)}\n{END}{rest.partition(END)[2]}"


def _row(record: Record, outcomes: Mapping[str, int]) -> list[str]:
    pair = record["pair"]
    deepspeed = pair["deepspeed"] + ("" if pair["torch"] == TORCH else f" (torch {pair['torch']})")
    if "error" in record["versions"]:
        return [deepspeed, pair["transformers"], f"does not load: {record['versions']['error']}", "inert", "none"]
    models = record["models"]
    stock = _grouped({name: str(outcomes.get(_general(case["stock"]), "works")) for name, case in models.items()})
    verified = [name for name, case in models.items() if not case["wrong"]]
    return [deepspeed, pair["transformers"], stock, _mostly(_backends(models)), _listed(verified, models)]


def _backends(models: Mapping[str, Any]) -> dict[str, str]:
    return {name: _backend(case["hepatch"]) for name, case in models.items()}


def _backend(outcome: str) -> str:
    """`native`, or `eager` with the first rule that refuses."""
    rule = re.search(r"\[([a-z0-9-]+)\]", outcome)
    return outcome if rule is None else f"eager `{rule[1]}`"


def _grouped(by_model: Mapping[str, str]) -> str:
    """`1: OPT, Llama; 2: Bloom`, in the order of the models."""
    groups = _groups(by_model)
    return "; ".join(f"{value}: {_listed(names, by_model)}" for value, names in groups.items())


def _mostly(by_model: Mapping[str, str]) -> str:
    """`native; eager: Bloom`: what most of the models share has no names."""
    groups = _groups(by_model)
    common = max(groups, key=lambda value: len(groups[value]))
    others = [f"{value}: {_listed(names, by_model)}" for value, names in groups.items() if value != common]
    return "; ".join([common, *others])


def _groups(by_model: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in by_model.items():
        groups.setdefault(value, []).append(name)
    return groups


def _listed(names: Iterable[str], every: Mapping[str, Any]) -> str:
    names = list(names)
    if names == list(every):
        return "all"
    return ", ".join(_titled(name) for name in names) or "none"


def _titled(name: str) -> str:
    family, comma, rest = name.partition(",")
    return NAMES[family] + comma.replace(",", "") + rest


def _numbered(records: Iterable[Record]) -> dict[str, int]:
    """A number for each way in which stock fails, in the order of the table."""
    found = [_general(case["stock"]) for record in records for case in record["models"].values()]
    return {
        outcome: number for number, outcome in enumerate(dict.fromkeys(each for each in found if each != "works"), 1)
    }


def _general(outcome: str) -> str:
    """An outcome without the version that happens to stand in its message, and as far as its first sentence."""
    return re.sub(r"version [0-9.]+ exceeds", "version X exceeds", outcome).partition("! ")[0]


def _told(outcome: str) -> str:
    step, _, message = outcome.partition(": ")
    return f"`{step}`: `{message}`"


def _summary(recorded: Mapping[str, Record]) -> str:
    green = sum(record["passed"] for record in recorded.values())
    minutes = sum(record["seconds"] for record in recorded.values()) / 60
    tests = sum(suite["passed"] for record in recorded.values() for suite in record["suites"].values())
    every = ", ".join(_titled(case.name) for case in CASES)
    return (
        f"{green} of {len(recorded)} pairs are green, on a CPU with torch {TORCH} where nothing else is said: {tests}"
        f" tests, {minutes:.0f} minutes on two cores. All models are: {every}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the README differs")
    given = parser.parse_args(arguments)
    before = README.read_text(encoding="utf-8")
    after = written(before, results.read())
    if not given.check:
        README.write_text(after, encoding="utf-8")
    elif before != after:
        print("README.md has another compatibility table than matrix/results.json makes: run python -m matrix.table")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
