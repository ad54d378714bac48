"""A result as a picture: ms per step against batch with the floor drawn in, and generate time by system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hepatch.bench.systems import SYSTEMS
from hepatch.bench.tables import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Greys and muted colours for the others, so that the two rows of hepatch's stand out; all differ in lightness too.
_COLOURS = {
    "unpatched": "#8c8c8c",
    "cuda-graph": "#b8a04a",
    "rollout": "#8a6fb0",
    "static-cache": "#3f7fb5",
    "kernels": "#e58a2e",
    "native": "#c8352b",
}
_MARKERS = dict(zip(_COLOURS, "sDv^Po", strict=True))
_ROOM_FOR_LABELS = 1.35


class NoMatplotlibError(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the picture of a result.

    Args:
        result: as `Run.measure` returns it.
        path: a file name with an ending that matplotlib knows, `.png` or `.svg`.

    Raises:
        NoMatplotlibError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlibError("The picture needs matplotlib: pip install 'hepatch[bench]'.") from error
    measured = [row for row in result["rows"] if row["failure"] is None]
    figure = Figure(figsize=(13, 5.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    _steps(left, measured, result)
    _generate(right, measured, result)
    hardware = (result["machine"].get("gpus") or ["CPU"])[0].split(",")[0]
    versions = result["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "transformers") if name in versions)
    figure.suptitle(f"{title(result)} tokens", fontsize=13, fontweight="bold")
    figure.supxlabel(f"{hardware}; {names}", fontsize=8, color="#555555")
    figure.savefig(path)


def _steps(axes: Axes, measured: list[Any], result: Mapping[str, Any]) -> None:
    """ms per step against batch, a line a system, the floor beneath."""
    batches = sorted({row["batch"] for row in measured})
    for name in SYSTEMS:
        points = sorted((row["batch"], row["ms_per_step"]) for row in measured if row["system"] == name)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker=_MARKERS[name],
                color=_COLOURS[name],
                linewidth=2.2 if name in ("native", "kernels") else 1.5,
                label=SYSTEMS[name].title,
            )
    floor: dict[int, float] = {int(batch): value for batch, value in result["floor_ms_per_step"].items()}
    if floor:
        known = sorted(floor)
        # A single batch still needs a floor that can be seen.
        reach: list[float] = [*known] if len(known) > 1 else [known[0] / 1.3, known[0] * 1.3]
        values: list[float] = [floor[batch] for batch in known] if len(known) > 1 else [floor[known[0]]] * 2
        axes.plot(reach, values, color="black", linestyle="--", linewidth=1.3, label="floor: memory bandwidth")
        axes.fill_between(reach, 0, values, color="black", alpha=0.08, linewidth=0)
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_yscale("log")
    lowest = min([*floor.values(), *(row["ms_per_step"] for row in measured if row["ms_per_step"] > 0)], default=0.1)
    highest = max((row["ms_per_step"] for row in measured), default=1.0)
    axes.set_ylim(lowest * 0.7, max(highest, lowest) * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("batch (rows)")
    axes.set_ylabel("ms per decode step (log)")
    axes.set_title("One decode step; lower is better", fontsize=11)
    axes.grid(visible=True, which="major", alpha=0.25)
    # Beneath the axis, where no line can be.
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)


def _generate(axes: Axes, measured: list[Any], result: Mapping[str, Any]) -> None:
    """Bars of one batch's generate time; whiskers are the least and most of the repeats."""
    work = result["workload"]
    batches = work["batches"]
    rows_wanted = work["train_batch"] or min(batches, key=lambda rows: abs(rows - 8))
    shown = [row for row in result["rows"] if row["batch"] == rows_wanted]
    most = max((row["generate_spread_ms"]["max"] for row in measured if row["batch"] == rows_wanted), default=1.0)
    for place, row in enumerate(reversed(shown)):
        if row["failure"] is not None:
            text = row["failure"] if len(row["failure"]) < 64 else row["failure"][:61] + "..."  # noqa: PLR2004
            axes.text(
                most * 0.01, place, f"no result: {text}", va="center", fontsize=7, color="#777777", style="italic"
            )
            continue
        times = row["generate_spread_ms"]
        axes.barh(place, times["median"], color=_COLOURS[row["system"]], height=0.62)
        around = [[times["median"] - times["min"]], [times["max"] - times["median"]]]
        axes.errorbar(times["median"], place, xerr=around, color="black", linewidth=1, capsize=3)
        claim = _unclaimed(row) if "no_claim" in row else f"{row['speed_up']:.1f}x" if "speed_up" in row else ""
        axes.text(times["max"] + most * 0.02, place, f"{times['median']:.0f} ms  {claim}", va="center", fontsize=9)
    axes.set_yticks(range(len(shown)), [row["title"] for row in reversed(shown)], fontsize=9)
    axes.set_xlim(0, most * _ROOM_FOR_LABELS)
    # Not left to matplotlib, which looks at bars alone and would cut off the text of a system that has none.
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("ms per generate, median; whiskers: least and most")
    axes.set_title(f"Whole generate, batch {rows_wanted}; over the unpatched engine", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _unclaimed(row: Mapping[str, Any]) -> str:
    return "fell back" if row.get("fallbacks") else "other tokens"
