"""How the demo shows what it measured."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from hepatch.commands.actor import Actor
from hepatch.commands.comparison import Measured
from hepatch.commands.rollout import rewards


def render(actor: Actor, measured: Measured) -> Iterator[RenderableType]:
    """What is printed at the end, in order: answers, cycles, times, tokens, and the heading of the report."""
    yield _answers(actor, measured)
    yield _cycles(measured)
    yield _times(actor, measured)
    yield _agreement(measured)
    yield Rule("hepatch.report(engine) after the last cycle", align="left")


def _answers(actor: Actor, measured: Measured) -> Table:
    sequences = measured.cycles[-1].rollout.sequences
    table = Table("prompt", "answer", title=f"{actor.name}: sampled answers of the last cycle", show_lines=True)
    table.add_column("reward", justify="right")
    for question, text, reward in zip(
        actor.questions(), actor.texts(sequences), rewards(actor, sequences).tolist(), strict=True
    ):
        table.add_row(escape(question), escape(text.strip()), f"{reward:.2f}")
    return table


def _cycles(measured: Measured) -> Table:
    table = Table(title="Cycles")
    for column in ("", "generate s", "new tokens", "train s", "mean reward", "loss"):
        table.add_column(column, justify="right" if column else "left")
    named = {"eager": measured.eager_cycle}
    named |= {f"regions {number}": cycle for number, cycle in enumerate(measured.cycles, start=1)}
    for name, cycle in named.items():
        table.add_row(
            name,
            f"{cycle.rollout.seconds:.2f}",
            str(cycle.rollout.new_tokens),
            f"{cycle.update.seconds:.2f}",
            f"{cycle.update.reward:.3f}",
            f"{cycle.update.loss:+.4f}",
        )
    return table


def _times(actor: Actor, measured: Measured) -> Table:
    rows = actor.prompts["input_ids"].shape[0]
    new_tokens = measured.comparisons[0].eager.new_tokens
    table = Table(
        title=f"Greedy answers of {new_tokens} tokens to {rows} prompts of up to {actor.prompt_tokens}: medians, in ms",
        caption=f"The first call with regions took {measured.first_call.seconds:.1f} s, compilation included.",
    )
    for column in ("", "eager", "regions", "speed-up"):
        table.add_column(column, justify="right" if column else "left")
    both = tuple(map(sum, zip(measured.generate_ms, measured.train_ms, strict=True)))
    for name, (eager, region) in {
        "generate": measured.generate_ms,
        "train step": measured.train_ms,
        "iteration": both,
    }.items():
        table.add_row(name, f"{eager:.1f}", f"{region:.1f}", f"{eager / region:.2f}x")
    return table


def _agreement(measured: Measured) -> str:
    lines = []
    for when, comparison in zip(("before training", "after training"), measured.comparisons, strict=True):
        same = comparison.equal_tokens == comparison.tokens
        style = "green" if same else "red"
        verdict = f"[{style}]{comparison.equal_tokens} of {comparison.tokens}[/] greedy tokens equal"
        lines.append(f"Tokens {when}: {verdict}, eager against regions on the same weights.")
    return "\n".join(lines)
