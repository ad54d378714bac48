"""Derived fields of a recorded result, computed anew by what the benchmark says of them now. Nothing is measured."""

from __future__ import annotations

from typing import Any

from benchmarks import memory, mixed

DERIVED = (
    "systems.*.extra_mib",
    "systems.*.kv_held_mib",
    "mixed.growth_after_first_third_mib",
    "mixed.recordings",
    "mixed.compilations",
    "mixed.flat",
    "targets",
)


def restate(result: dict[str, Any]) -> None:
    """Computes the fields of `DERIVED` but `targets` in place, from the readings in the result; twice is harmless.

    A result from before there were two figures of memory has the peak under `extra_mib`; it becomes `peak_extra_mib`.
    """
    for system in result["systems"].values():
        if "held_between_calls_mib" in system:
            system.setdefault("peak_extra_mib", system["extra_mib"])
            system.update(memory.between_calls(system["held_between_calls_mib"], system["kv_mib"]))
    if "mixed" in result:
        result["mixed"] |= mixed.judge(result["mixed"]["trace"], result["mixed"]["recoveries"])
    result["restated"] = list(DERIVED)
