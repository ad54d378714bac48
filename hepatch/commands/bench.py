"""`hepatch bench`: systems side by side on this machine and model, in one command."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hepatch.commands.progress import progress

EXIT_NO_SYSTEM = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_WIDTH = 140


def bench(
    model: Annotated[
        str,
        typer.Option(help="A shape (opt-125m, opt-1.3b, llama-1b, qwen2-0.5b, smollm2) or a local model folder."),
    ] = "opt-1.3b",
    *,
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16 or fp32. Default: fp16, on a CPU fp32.")] = None,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage of the engines.")] = 2,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be given several times.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the (longest) prompt.")] = 256,
    shortest_prompt: Annotated[
        int | None, typer.Option(min=1, help="Prompts of so many tokens up to --prompt, left-padded.")
    ] = None,
    new: Annotated[int, typer.Option(min=2, help="New tokens, at the most.")] = 128,
    early_ends: Annotated[bool, typer.Option("--early-ends", help="Rows end at random steps.")] = False,
    workload: Annotated[
        str | None, typer.Option(help="A recorded workload instead of the sizes above: seed, long or variable.")
    ] = None,
    system: Annotated[list[str] | None, typer.Option(help="Only these systems; may be given several times.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each system and batch.")] = 5,
    iterations: Annotated[int, typer.Option(min=0, help="RLHF-shaped iterations of each system.")] = 2,
    seconds: Annotated[float, typer.Option(min=10, help="Limit of the run; rounds are cut short to keep it.")] = 230.0,
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds for one answer of a system.")] = 100.0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    build_op: Annotated[
        bool, typer.Option("--build-op", help="Build DeepSpeed's inference op for the stock systems (nvcc).")
    ] = False,
    warm_caches: Annotated[
        bool, typer.Option("--warm-caches", help="Use the compilers' own caches instead of empty ones.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A random model of two layers: all of it in a minute.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")] = None,
    picture_file: Annotated[Path | None, typer.Option("--picture", help="Draw the result: a .png or .svg.")] = None,
) -> None:
    """Time generate and training with and without hepatch, beside what DeepSpeed and transformers offer."""
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width of its own, and the tables need more than the usual guess.
        console = Console(width=max(console.width, _WIDTH))
    with console.status("load torch, DeepSpeed and transformers"):
        from hepatch.bench import presets, tables
        from hepatch.bench.client import Place
        from hepatch.bench.run import Plan, Run
        from hepatch.bench.systems import SYSTEMS
        from hepatch.bench.workload import Workload

    place_device = device or presets.default_device()
    try:
        sizes = Workload(
            model=model,
            dtype=dtype or ("fp32" if place_device == "cpu" else "fp16"),
            zero_stage=zero_stage,
            batches=tuple(batch or (1, 4, 8, 16, 32)),
            prompt_tokens=prompt,
            new_tokens=new,
            shortest_prompt=shortest_prompt,
            early_ends=early_ends,
        )
        if tiny or workload is not None:
            sizes = presets.preset("tiny" if tiny else str(workload), sizes)
        presets.check(sizes, place_device, tuple(system or SYSTEMS))
        for path in filter(None, (json_file, markdown_file, picture_file)):
            presets.check_writable(path)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(EXIT_BAD_INPUT) from None

    plan = Plan(tuple(system or SYSTEMS), rounds=rounds, iterations=iterations, seconds=seconds)
    with tempfile.TemporaryDirectory() as scratch, _terminated_as_interrupted():
        place = Place(place_device, Path(scratch), timeout, build_op, warm_caches)
        with progress(console, plan.steps(len(sizes.batches))) as step:
            result = Run(sizes, plan, place, step, _command()).measure()
    for part in tables.rich_tables(result):
        console.print(part, highlight=False)
    _write(result, json_file, markdown_file, picture_file, console)
    for failed in (failed for failed in result["errors"] if "\n" in failed["error"]):
        first = f"{failed['system']} failed during {failed['during']}; the end of what it said:"
        console.print(first, style="red", markup=False)
        console.print(failed["error"][-1500:], markup=False, highlight=False, style="dim")
    if result["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if all(row["failure"] is not None for row in result["rows"]):
        raise typer.Exit(EXIT_NO_SYSTEM)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A time limit or a job scheduler ends a run as Ctrl-C does: with what was measured.

    Once: `timeout` sends SIGTERM to a process and to its group, and the second must not end what the first began.
    """

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _command() -> str:
    """The command line without where results go: a result names no folder."""
    given, shown, skip = sys.argv[1:], ["hepatch"], False
    for word in given:
        if skip:
            skip = False
        elif word in ("--json", "--markdown", "--picture"):
            skip = True
        elif not word.startswith(("--json=", "--markdown=", "--picture=")):
            shown.append(Path(word).name if "/" in word else word)
    return " ".join(shown)


def _write(
    result: dict[str, Any],
    json_file: Path | None,
    markdown_file: Path | None,
    picture_file: Path | None,
    console: Console,
) -> None:
    from hepatch.bench import picture, tables

    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(tables.markdown(result), encoding="utf-8")
    if picture_file is not None:
        try:
            picture.draw(result, picture_file)
        except picture.NoMatplotlibError as error:
            console.print(str(error), style="red", markup=False)
