"""A result as a person reads it: a table for the terminal, the same as Markdown, and lines about what it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hepatch.bench.systems import SYSTEMS, Unpatched

COLUMNS = (
    "batch",
    "system",
    "generate ms [min-max]",
    "ms/step",
    "tokens/s",
    "of floor",
    "GB/s",
    "kernels/step",
    "train ms",
    "iteration ms",
    "first call s (compile + record)",
    "extra MiB [peak]",
    "tokens equal",
    "speed-up",
)
_NONE = "-"


def _number(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return _NONE if value is None else format(value, form)


def _memory(row: Mapping[str, Any], device: str) -> str:
    if device == "cpu" or "extra_mib" not in row:
        return _NONE
    return f"{row['extra_mib']:.0f} [{row['peak_extra_mib']:.0f}]"


def cells(row: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """What stands in each of `COLUMNS`; a row that failed says how in the third."""
    if row["failure"] is not None:
        return (str(row["batch"]), row["title"], row["failure"], *[""] * (len(COLUMNS) - 3))
    times = row["generate_spread_ms"]
    first = _NONE
    if "first_call_s" in row:
        first = f"{row['first_call_s']:.1f} ({row['compile_s']:.1f} + {row['record_s']:.1f})"
    return (
        str(row["batch"]),
        row["title"],
        f"{times['median']:.1f} [{times['min']:.1f}-{times['max']:.1f}]",
        _number(row, "ms_per_step", ".2f"),
        _number(row, "tokens_per_s", ".0f"),
        _number(row, "share_of_floor", ".0%"),
        _number(row, "gb_per_s", ".0f" if row.get("gb_per_s", 0) >= 10 else ".2f"),  # noqa: PLR2004 - three digits
        _number(row, "kernels_per_step", ".0f"),
        _number(row, "train_ms", ".1f"),
        _number(row, "iteration_ms", ".1f"),
        first,
        _memory(row, device),
        f"{row['tokens_equal']}/{row['tokens_total']}",
        row.get("no_claim") or (f"{row['speed_up']:.2f}x" if "speed_up" in row else _NONE),
    )


_DECODING = (0, 1, 2, 3, 4, 5, 6, 12, 13)
_AROUND = (0, 1, 7, 8, 9, 10, 11)
"""Which of `COLUMNS` the terminal's two tables show: all of them are too many for its width."""


def rich_tables(result: Mapping[str, Any]) -> Iterator[Table | str]:
    """What a terminal shows: decoding, then what is around it, then what the numbers stand on."""
    yield _rich(result, _DECODING, result["rows"], title(result))
    around = [row for row in result["rows"] if "first_call_s" in row or "iteration_ms" in row]
    yield _rich(result, _AROUND, around, "Training, first call and memory")
    yield escape("\n".join(conditions(result)))


def _rich(result: Mapping[str, Any], shown: Sequence[int], rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    table = Table(title=escape(name), title_justify="left")
    for number in shown:
        is_name = number == 1
        table.add_column(
            escape(COLUMNS[number]), justify="left" if is_name else "right", min_width=26 if is_name else 5
        )
    last = None
    for row in rows:
        if last not in (None, row["batch"]):
            table.add_section()
        last = row["batch"]
        style = "red" if row["failure"] else "yellow" if row.get("no_claim") else None
        found = list(cells(row, result["machine"]["device"]))
        if row["failure"] is not None:
            # Beneath the name, where there is room for a sentence.
            found[1:3] = f"{found[1]}: {found[2]}", ""
        table.add_row(*(escape(found[number]) for number in shown), style=style)
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """Title, table and conditions as Markdown."""
    lines = [f"## {title(result)}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, result["machine"]["device"])) + " |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, "", *(f"* {line}" for line in conditions(result)), ""])


def title(result: Mapping[str, Any]) -> str:
    """What was run, in a line."""
    work = result["workload"]
    shortest = work["shortest_prompt"]
    prompts = f"{shortest} to {work['prompt_tokens']}" if shortest is not None else str(work["prompt_tokens"])
    ends = "up to " if work["early_ends"] else ""
    new = f"{ends}{work['new_tokens']} new"
    return f"{work['model']}, {work['dtype']}, ZeRO-{work['zero_stage']}: prompt {prompts}, {new}"


def conditions(result: Mapping[str, Any]) -> Iterator[str]:
    """What the numbers stand on."""
    machine = result["machine"]
    hardware = "; ".join(machine.get("gpus", ())) or f"CPU, {machine['cpu_cores']} cores, {machine['architecture']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    yield f"{hardware}; {versions}"
    yield f"Command: {result['command']}"
    if result.get("interrupted"):
        yield "Interrupted: what had been measured by then."
    if "copy_gb_per_s" in result:
        rate = f"{result['copy_gb_per_s']:.0f} GB/s, a copy measured in this run"
        yield f"Floor: weights and live KV read once at {rate}."
    if result["reference"] is not None:
        yield f"Tokens are compared with those of: {result['systems'][result['reference']]['title']}."
    yield f"Speed-up: generate, over {SYSTEMS[Unpatched.name].title} as shipped."
    if not result.get("weights_equal", True):
        yield "WARNING: the processes did not hold the same weights."
    for rows, (least, median, most) in result.get("answer_lengths", {}).items():
        if result["workload"]["early_ends"]:
            yield f"Batch {rows}: rows ended after {least} (shortest), {median} (median), {most} (longest) tokens."
    notes = {row["title"]: row["note"] for row in result["rows"] if row.get("note")}
    yield from (f"{name}: {note}." for name, note in notes.items())
