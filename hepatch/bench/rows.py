"""From what was measured to what is shown: one row for each system and batch, and what may be claimed of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hepatch.bench.floor import bytes_per_step
from hepatch.bench.spread import spread
from hepatch.bench.systems import OURS, SYSTEMS, Unpatched
from hepatch.bench.workload import Workload

if TYPE_CHECKING:
    from hepatch.bench.run import SystemRun


def finish(result: dict[str, Any], workload: Workload, systems: Mapping[str, SystemRun]) -> dict[str, Any]:
    """Adds `systems`, `rows` and the floor to a result.

    Args:
        result: command, machine, versions and the copy rate.
        workload: of the run.
        systems: what was measured.
    """
    result["systems"] = {
        name: {"title": SYSTEMS[name].title, "failure": system.failure, **system.facts}
        for name, system in systems.items()
    }
    result["rows"] = [
        _row(name, rows, system, workload, result) for rows in workload.batches for name, system in systems.items()
    ]
    result["floor_ms_per_step"] = {
        row["batch"]: row["floor_ms_per_step"] for row in result["rows"] if "floor_ms_per_step" in row
    }
    for row in result["rows"]:
        _claim(row, result["rows"])
    return result


def _row(name: str, rows: int, system: SystemRun, workload: Workload, result: Mapping[str, Any]) -> dict[str, Any]:
    calls = dict(system.calls.get(rows, {}))
    row: dict[str, Any] = {"system": name, "title": SYSTEMS[name].title, "batch": rows}
    whole, prompt = calls.pop("generate_times_ms", None), calls.pop("prefill_times_ms", None)
    runs = calls.pop("iterations", None)
    row |= calls
    if not whole or not prompt:
        return {**row, "failure": system.failure or "not reached before the run ended"}
    generate, prefill = spread(whole), spread(prompt)
    steps = max(1, calls["columns"] - 1)
    step_ms = (generate["median"] - prefill["median"]) / steps
    row |= {
        "failure": None,
        "generate_ms": generate["median"],
        "generate_spread_ms": generate,
        "prefill_ms": prefill["median"],
        "ms_per_step": round(step_ms, 4),
        "tokens_per_s": round(1e3 * calls["live_tokens"] / generate["median"], 1),
    }
    if runs:
        medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        train_ms = statistics.median([*(run["train_ms"] for run in runs), *row.get("train_steps_ms", ())])
        row |= {"train_ms": round(train_ms, 2), "iteration_ms": medians["iteration_ms"], "iteration_runs": runs}
    _bandwidth(row, workload, system.facts, result.get("copy_gb_per_s"))
    if rows == max(workload.batches) and "first_call_s" in system.facts:
        first_s, compile_s = system.facts["first_call_s"], system.facts["compile_s"]
        rest = first_s - compile_s - generate["median"] / 1e3
        row |= {"first_call_s": first_s, "compile_s": compile_s, "record_s": round(max(0.0, rest), 3)}
    return row


def _bandwidth(row: dict[str, Any], workload: Workload, facts: Mapping[str, Any], copy_gb_per_s: float | None) -> None:
    """The least time of a step and how near it this row comes."""
    read = bytes_per_step(
        workload,
        row["batch"],
        row["columns"],
        weights=facts["weight_bytes_per_step"],
        kv_token=facts["kv_bytes_per_token"],
    )
    if row["ms_per_step"] > 0:
        row["gb_per_s"] = round(read / row["ms_per_step"] / 1e6, 1)
    if copy_gb_per_s:
        row["floor_ms_per_step"] = round(read / copy_gb_per_s / 1e6, 4)
        if row["ms_per_step"] > 0:
            row["share_of_floor"] = round(row["floor_ms_per_step"] / row["ms_per_step"], 3)


def _claim(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """How much faster than the unpatched engine, where that may be said.

    A row of hepatch's in which a call left its region, or whose tokens differ by more than rounding explains, claims
    nothing, and says so in `no_claim`.
    """
    if row["failure"] is not None:
        return
    if row["system"] in OURS:
        if row.get("fallbacks"):
            row["no_claim"] = f"{len(row['fallbacks'])} calls fell back: {row['fallbacks'][0]}"
            return
        if row["tokens_equal"] < row["tokens_total"] and not row.get("all_differences_are_ties"):
            row["no_claim"] = "tokens differ by more than rounding explains"
            return
    base = next((one for one in rows if one["system"] == Unpatched.name and one["batch"] == row["batch"]), None)
    if base is not None and base["failure"] is None:
        row["speed_up"] = round(base["generate_ms"] / row["generate_ms"], 2)
