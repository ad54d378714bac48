"""What the demo does: the same loop without and with regions, in one process, on the same prompts and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import hepatch
from hepatch.commands.actor import Actor
from hepatch.commands.progress import Step
from hepatch.commands.rollout import GREEDY, SAMPLED, Rollout, Update, build_engine, roll_out, update


@dataclass(frozen=True)
class Cycle:
    """One RLHF iteration."""

    rollout: Rollout
    update: Update


@dataclass(frozen=True)
class Comparison:
    """Greedy answers of the same weights to the same prompts, without and with regions."""

    eager: Rollout
    region: Rollout

    @property
    def tokens(self) -> int:
        """How many tokens were compared: rows times the columns of the longer of the two."""
        return self.eager.sequences.shape[0] * max(self.eager.new_tokens, self.region.new_tokens)

    @property
    def equal_tokens(self) -> int:
        """How many of them are the same on both sides."""
        columns = min(self.eager.new_tokens, self.region.new_tokens)
        eager, region = (
            side.sequences[:, side.sequences.shape[1] - side.new_tokens :][:, :columns]
            for side in (self.eager, self.region)
        )
        return int((eager == region).sum())


@dataclass(frozen=True)
class Measured:
    """Everything that the demo shows.

    Attributes:
        eager_cycle: an iteration without regions.
        first_call: the first `generate` with regions, which compiles.
        cycles: the iterations with regions.
        comparisons: before the first of them, and after the last one, on the weights that it left.
        report: `hepatch.report(engine)` after the last cycle, as text.
    """

    eager_cycle: Cycle
    first_call: Rollout
    cycles: tuple[Cycle, ...]
    comparisons: tuple[Comparison, Comparison]
    report: str

    @property
    def generate_ms(self) -> tuple[float, float]:
        """Median time of a greedy `generate` in ms: eager, with regions."""
        pairs = self.comparisons
        return 1000 * median(pair.eager.seconds for pair in pairs), 1000 * median(pair.region.seconds for pair in pairs)

    @property
    def train_ms(self) -> tuple[float, float]:
        """Median time of a training step in ms: without regions, with them."""
        return 1000 * self.eager_cycle.update.seconds, 1000 * median(cycle.update.seconds for cycle in self.cycles)


def measure(actor: Actor, step: Step, *, cycles: int, new_tokens: int, micro_batch: int) -> Measured:
    """Builds an engine and runs the loop on both sides.

    Args:
        actor: the model and its prompts.
        step: shows what is going on.
        cycles: iterations with regions.
        new_tokens: the longest answer.
        micro_batch: rows per training forward.
    """
    with step("deepspeed.initialize: hybrid engine, ZeRO-2"):
        engine = build_engine(actor, micro_batch, new_tokens)

    def generate(title: str, how: Mapping[str, Any] = GREEDY) -> Rollout:
        with step(title):
            return roll_out(engine, actor, new_tokens, how)

    def iterate(title: str) -> Cycle:
        rollout = generate(f"{title}: sample answers", SAMPLED)
        with step(f"{title}: reward, train"):
            return Cycle(rollout, update(engine, actor, rollout.sequences, micro_batch))

    # Two turns for each side, eager first and last: disable() gives up what was compiled, so that more turns of
    # regions would compile more often.
    hepatch.disable()
    eager_cycle = iterate("eager")
    eager_before = generate("eager: greedy answers")

    hepatch.enable()
    first_call = generate("regions: first call, which compiles")
    region_before = generate("regions: greedy answers")
    trained = tuple(iterate(f"regions: cycle {number} of {cycles}") for number in range(1, cycles + 1))
    region_after = generate("regions: greedy answers of the trained model")
    report = str(hepatch.report(engine))

    hepatch.disable()
    eager_after = generate("eager: greedy answers of the trained model")
    hepatch.enable()
    return Measured(
        eager_cycle=eager_cycle,
        first_call=first_call,
        cycles=trained,
        comparisons=(Comparison(eager_before, region_before), Comparison(eager_after, region_after)),
        report=report,
    )
