"""The recorded results of the matrix: `matrix/results.json`, one record a cell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix.pairs import Pair

FILE = Path(__file__).with_name("results.json")

Record = dict[str, Any]


def read() -> dict[str, Record]:
    """Every cell's record by the cell's name."""
    if not FILE.exists():
        return {}
    recorded: dict[str, Record] = json.loads(FILE.read_text(encoding="utf-8"))
    return recorded


def write(pair: Pair, record: Record) -> None:
    """Keep a cell's record in place of the one before."""
    everything = {**read(), pair.name: record}
    ordered = dict(sorted(everything.items(), key=lambda item: _order(item[1])))
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def faults(record: Record) -> Iterator[str]:
    """What is wrong in a cell, one line each; none where it is green."""
    if "error" in record["versions"]:
        if not record["inert"]:
            yield f"the releases do not load, and with hepatch otherwise than without: {record['versions']['error']}"
        return
    for name, wanted in record["pair"].items():
        found = record["versions"].get(name, "").partition("+")[0]
        if found and found != wanted:
            yield f"{name} {found} was loaded instead of {wanted}"
    for model, case in record["models"].items():
        yield from (f"{model}: {line}" for line in case["wrong"])
    for suite, outcome in record["suites"].items():
        yield from (f"{suite}: {test}" for test in outcome["failed"])
        if not outcome["passed"]:
            yield f"{suite}: no test passed"


def changed(pair: Pair, record: Record) -> list[str]:
    """Where a cell answers otherwise than recorded: another path is a change although its tokens are right."""
    before = read().get(pair.name)
    if before is None:
        return [f"{pair.name} has no recorded result: run `make matrix`"]
    names = record["models"].keys() | before["models"].keys()
    lines = []
    for name in sorted(names):
        for side in ("stock", "hepatch"):
            was, now = (each["models"].get(name, {}).get(side, "not run") for each in (before, record))
            if was != now:
                lines.append(f"{name}, {side}: was {was!r}, is {now!r}")
    return lines


def told(name: str, record: Record) -> str:
    """A cell's outcome for a log: a line, and one for each fault."""
    native = [model for model, case in record["models"].items() if case["hepatch"] == "native"]
    passed = ", ".join(f"{suite} {outcome['passed']}" for suite, outcome in record["suites"].items())
    lines = [
        (
            f"{'green' if record['passed'] else 'RED'} {name}: {len(native)} of {len(record['models'])} cases native,"
            f" tests passed: {passed}; {record['seconds']} s"
        ),
        *(f"  {line}" for line in faults(record)),
    ]
    return "\n".join(lines)


def _order(record: Record) -> list[tuple[int, ...]]:
    return [tuple(int(part) for part in version.split(".") if part.isdigit()) for version in record["pair"].values()]
