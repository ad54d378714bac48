"""`hepatch demo`: an RLHF-shaped loop on a real model, its own layers eager against the compiled region."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hepatch.commands.progress import progress
from hepatch.commands.prompts import PROMPTS


def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="A local folder with a causal LM and its tokenizer. Default: SmolLM2-135M-Instruct."),
    ] = None,
    *,
    tiny: Annotated[bool, typer.Option("--tiny", help="A random model of two layers: all of it in a minute.")] = False,
    cycles: Annotated[int, typer.Option(min=1, help="Training iterations with regions.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the longest answer.")] = 48,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows per training forward.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the samples, and of the random model.")] = 0,
) -> None:
    """Train a small chat model for a few RLHF cycles and compare its rollouts without and with hepatch."""
    if tiny and model is not None:
        raise typer.BadParameter("--tiny brings its own model: leave one of the two out.", param_hint="--model")
    if len(PROMPTS) % micro_batch:
        raise typer.BadParameter(
            f"{micro_batch} does not divide the {len(PROMPTS)} prompts.", param_hint="--micro-batch"
        )

    console = Console()
    with progress(console, steps=10 + 2 * cycles) as step:
        with step("load torch, DeepSpeed and transformers"):
            from hepatch.commands import actor as actors
            from hepatch.commands import comparison, tables
        try:
            with step("load the model"):
                actor = actors.load(model, tiny=tiny, seed=seed)
        except actors.ActorNotFoundError as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(code=2) from None
        measured = comparison.measure(actor, step, cycles=cycles, new_tokens=new_tokens, micro_batch=micro_batch)
    for part in tables.render(actor, measured):
        console.print(part)
    # Plain and unwrapped: it is made to be pasted into an issue.
    console.print(measured.report, markup=False, highlight=False, soft_wrap=True)
