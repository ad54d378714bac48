"""Calls of mixed shapes under hepatch: memory and recordings must be flat after the first third, stopped rows right.

The first calls visit the extremes (shortest and longest prompt, longest answer, every batch) twice, so that every cache
size and every region key is met early; the others are drawn. Every fifth call comes after a training step. Every third
drawn call is made again with end tokens taken from its own answer, at another position for each row: a row must be
padding after its first end token.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hepatch.bench import memory, worker
from hepatch.bench.systems import Native
from hepatch.bench.workload import PAD, SEED, build_batch, generate_arguments

if TYPE_CHECKING:
    import torch

FLAT_MIB = 4.0


@dataclass(frozen=True)
class Range:
    """Between what the calls' sizes are drawn: shortest and longest prompt, fewest and most new tokens, batches."""

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    batches: tuple[int, ...]


FULL = Range((16, 256), (4, 128), (8, 3, 1))
TINY = Range((4, 24), (2, 12), (4, 3, 1))


class Commands(worker.Commands):
    """What the seed benchmark asks of a system beside what every benchmark does."""

    def generate(self, new_tokens: int | None = None) -> float:
        """As the base class. Raises RuntimeError where the call left hepatch's region: it must never be timed."""
        elapsed_ms = super().generate(new_tokens)
        if self.system.fallbacks():
            raise RuntimeError(f"a call was not fused: {self.system.fallbacks()[-1]}")
        return elapsed_ms

    def mixed(self, count: int, tiny: bool) -> dict[str, Any]:
        """The mixed calls (hepatch only)."""
        assert isinstance(self.system, Native)
        return run(self.system, TINY if tiny else FULL, count)


@dataclass(frozen=True)
class Shape:
    """One call: rows, prompt columns, most new tokens, whether end tokens are set."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    stops: bool = False


def schedule(sizes: Range, count: int) -> list[Shape]:
    """`count` shapes, the same for every run."""
    draw = random.Random(SEED)
    (shortest, longest), (fewest, most) = sizes.prompt_tokens, sizes.new_tokens
    shapes = [Shape(batch, prompt, most) for batch in sizes.batches for prompt in (shortest, longest) for _ in range(2)]
    while len(shapes) < count:
        shape = Shape(draw.choice(sizes.batches), draw.randint(shortest, longest), draw.randint(fewest, most))
        shapes.append(shape)
        if len(shapes) % 3 == 0 and shape.new_tokens > 2:
            shapes.append(Shape(shape.batch, shape.prompt_tokens, shape.new_tokens, stops=True))
    return shapes[:count]


def stops_rightly(tokens: torch.Tensor, ends: list[int], shape: Shape) -> bool:
    """Whether every row is padding after its first end token and the answer is cut where the last row ends."""
    new = [row[shape.prompt_tokens :] for row in tokens.tolist()]
    lengths = [next((index + 1 for index, token in enumerate(row) if token in ends), shape.new_tokens) for row in new]
    padded = all(set(row[length:]) <= {PAD} for row, length in zip(new, lengths, strict=True))
    return padded and len(new[0]) == max(lengths)


def run(system: Native, sizes: Range, count: int) -> dict[str, Any]:
    """Makes the calls; returns the trace of memory and counters and the verdicts."""
    vocabulary = int(system.engine.module.config.vocab_size)
    trace: list[dict[str, Any]] = []
    stopped_calls = wrong_stops = same_tokens = compared_tokens = 0
    never = vocabulary - 1
    answer: torch.Tensor | None = None
    for index, shape in enumerate(schedule(sizes, count)):
        if index and index % 5 == 0 and not shape.stops:  # a stopped call repeats the call before it: same weights
            system.train_step(system.rollout())
            system.engine.eval()
        batch = build_batch(system.workload, vocabulary, system.device, shape.batch, shape.prompt_tokens)
        ends = [never]
        if shape.stops and answer is not None:
            produced = answer.shape[1] - shape.prompt_tokens
            columns = [shape.prompt_tokens + (2 + row * 7) % produced for row in range(shape.batch)]
            ends += sorted({int(answer[row, column]) for row, column in enumerate(columns)})
        arguments = {**generate_arguments(shape.new_tokens), "min_new_tokens": 0, "eos_token_id": ends}
        tokens = system.generate(batch, **arguments).cpu()
        wrong_stops += not stops_rightly(tokens, ends, shape)
        if shape.stops and answer is not None:
            stopped_calls += 1
            common = min(tokens.shape[1], answer.shape[1])
            live = tokens[:, shape.prompt_tokens : common] != PAD
            same_tokens += int((tokens == answer[:, : tokens.shape[1]])[:, shape.prompt_tokens : common][live].sum())
            compared_tokens += int(live.sum())
        answer = tokens
        if index in (count // 3 - 1, count - 1):
            gc.collect()  # at every call it would take longer than the call
        reading, report = memory.read(), system.report()
        trace.append(
            {
                "batch": shape.batch,
                "prompt_tokens": shape.prompt_tokens,
                "new_tokens": tokens.shape[1] - shape.prompt_tokens,
                "allocated_mib": round(reading.allocated, 2),
                "reserved_mib": round(reading.reserved, 2),
                "graph_pool_mib": round(reading.pool_reserved, 2),
                "cache_mib": report["cache_mib"],
                "recordings": report["recordings"],
                "compilations": report["compilations"],
            }
        )
    return {
        **judge(trace, system.report()["recoveries"]),
        "calls_with_early_stops": stopped_calls,
        "calls_stopped_wrongly": wrong_stops,
        "tokens_equal_to_unstopped_call": [same_tokens, compared_tokens],
        "trace": trace,
    }


def judge(trace: Sequence[Mapping[str, Any]], recoveries: int) -> dict[str, Any]:
    """Whether memory and recordings are flat after the first third of the calls.

    Growth is the largest reading after the first third less the largest within it. What torch's allocator has reserved
    is shown and not judged: it is a cache, filled by training and emptied by each recording.

    Args:
        trace: a reading after each call.
        recoveries: of all calls.
    """
    early, late = trace[: len(trace) // 3], trace[len(trace) // 3 :]
    growth = {
        key: round(max(reading[key] for reading in late) - max(reading[key] for reading in early), 2)
        for key in ("allocated_mib", "reserved_mib", "graph_pool_mib", "cache_mib")
    }
    counts = {key: [early[-1][key], late[-1][key]] for key in ("recordings", "compilations")}
    return {
        "calls": len(trace),
        "growth_after_first_third_mib": growth,
        **counts,
        "recoveries": recoveries,
        "flat": growth["allocated_mib"] <= FLAT_MIB
        and growth["graph_pool_mib"] <= 0
        and growth["cache_mib"] <= 0
        and counts["recordings"][0] == counts["recordings"][1]
        and recoveries == 0,
    }
