"""`hepatch doctor`: is it on, would it help, and if not, why."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

EXIT_BAD_INPUT = 2


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="A ds_config file to judge. Default: a plain hybrid engine.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model folder, a config.json, or a shape of `hepatch bench`; no weight is read."),
    ] = None,
    *,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Import this module first, to see what it patches; may be given several times."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Build a tiny engine and compare it with an untouched copy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, what is patched, which guards refuse, and what would run instead.

    Exit status: 0 a region would run, 1 everything stays eager, 2 something is broken or cannot be read.
    """
    console, aside = Console(), Console(stderr=True)
    with _undisturbed(), aside.status("load torch, DeepSpeed and transformers") if not as_json else nullcontext():
        import hepatch
        from hepatch import activation, settings
        from hepatch.doctor import configuration, examination, text
        from hepatch.doctor.findings import Verdict

        if settings.read().enabled:
            # Hosts that were loaded half-way when hepatch came, or not at all: from here on it counts what is there.
            with contextlib.suppress(RuntimeError):
                hepatch.enable()
        try:
            found = examination.examine(config, model, imports or ())
        except configuration.BadInputError as error:
            aside.print(str(error), style="red", markup=False)
            raise typer.Exit(EXIT_BAD_INPUT) from None
    if self_test and not activation.is_on():
        aside.print("The self-test is left out: hepatch is off, and it would test stock.", style="yellow")
    elif self_test and not found.problems:
        from hepatch.doctor import selftest

        stage = configuration.read(config).zero_stage

        @contextmanager
        def step(title: str) -> Iterator[None]:
            with aside.status(f"self-test: {title}"):
                yield

        with _undisturbed():
            try:
                found.self_test, report = selftest.run(stage, step)
                found.self_test_report = str(report)
                found.self_test_refusals = [refusal.rule for refusal in report.refusals]
                # An engine that ran knows better than a guess from its configuration.
                found.backend = report.backend if found.verdict is Verdict.REGION else found.backend
            except Exception as error:  # noqa: BLE001 - what a user's engine would meet
                found.problems.append(f"the self-test failed with {type(error).__name__}: {error}")
    if as_json:
        # Not through rich, which would wrap it.
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        for line, style in text.lines(found):
            console.print(Text(line, style=style), soft_wrap=True)
    raise typer.Exit(int(found.verdict))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps what the hosts print and log out of a block that is made for pasting; hepatch's own warnings still come."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
