"""Token selection inside the region: logits processing, greedy or sampled choice, end of sequence, padding after it.

transformers' own processor classes do the arithmetic where they trace. Two things are ours, because a graph has no
Python state: the numbers a caller may change from call to call (temperature, top-p, penalty) are read from device
scalars, and minimum lengths compare the position on the device instead of a tensor's shape.

Sampling takes the highest of score plus Gumbel noise, which draws from the softmax of the scores exactly; `multinomial`
is not recorded into graphs. The noise is drawn outside the region, one draw a token from torch's default generator:
compiling, warming up and recording therefore never touch the random state, and a seed reproduces.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PROCESSORS_MODULE = "transformers.generation.logits_process"
# Class, and the float that it reads at each call; None: it has none.
# Checked by test against the installed transformers.
SCALARS = {
    "TemperatureLogitsWarper": "temperature",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "RepetitionPenaltyLogitsProcessor": "penalty",
    "TopKLogitsWarper": None,
    "LogitNormalization": None,
}
# Integers that shape the graph, so that another value is another graph.
BAKED = {
    "TopKLogitsWarper": ("top_k", "min_tokens_to_keep", "filter_value"),
    "TopPLogitsWarper": ("min_tokens_to_keep", "filter_value"),
    "MinPLogitsWarper": ("min_tokens_to_keep", "filter_value"),
}
MINIMUM_LENGTH = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
EOS_SLOTS = 8
NO_TOKEN = -1


class Untraceable(Exception):  # noqa: N818 - no error: the call goes on eagerly, with this as its reason
    """A processor or a criterion that a region does not express; the message names it."""


@dataclass(frozen=True)
class Selection:
    """What a compiled step bakes in. Equal selections share a region, whatever their numbers are.

    Attributes:
        do_sample: sample instead of taking the highest score.
        stages: for each processor its class and what it bakes in, in the caller's order.
        eos_slots: how many end-of-sequence ids each list of them has room for.
        scores: keep the processed scores of each step.
        logits: keep the raw logits of each step.
        deterministic: the caller asked torch for deterministic algorithms.
    """

    do_sample: bool
    stages: tuple[tuple[Any, ...], ...] = ()
    eos_slots: int = EOS_SLOTS
    scores: bool = False
    logits: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Request:
    """One call's token selection: the selection, the processors it came from, and the numbers that the graph reads.

    Attributes:
        selection: what is baked in.
        processors: the caller's own processors, in order.
        eos: ids that end a row; empty where nothing does.
        pad: the id that finished rows get.
        ignored: int64 `[batch]`, leading columns of each row that a repetition penalty does not count, or None.
    """

    selection: Selection
    processors: tuple[Any, ...]
    eos: tuple[int, ...]
    pad: int
    ignored: torch.Tensor | None = None


def plan(
    processors: Sequence[Any],
    *,
    do_sample: bool,
    eos: Sequence[int],
    pad: int | None,
    scores: bool,
    logits: bool,
    deterministic: bool,
) -> Request:
    """Says how a region selects tokens as these processors would.

    Args:
        processors: transformers' prepared logits processors.
        do_sample: as in the generation config.
        eos: ids of the end-of-sequence criterion; empty without one.
        pad: the padding id, or None where the call has none.
        scores: keep processed scores.
        logits: keep raw logits.
        deterministic: as asked of torch.

    Raises:
        Untraceable: a processor is not one of `SCALARS` or `MINIMUM_LENGTH`.
    """
    stages = tuple(_stage(processor) for processor in processors)
    most_ids = max([len(eos), *(len(eos_ids(p)) for p in processors if type(p).__name__ in MINIMUM_LENGTH)])
    slots = EOS_SLOTS
    while slots < most_ids:
        slots *= 2
    if eos and pad is None:
        raise Untraceable("an end-of-sequence id without a padding id")
    return Request(
        Selection(do_sample, stages, slots, scores, logits, deterministic),
        tuple(processors),
        tuple(eos),
        0 if pad is None else pad,
        next(
            (p.prompt_ignore_length for p in processors if getattr(p, "prompt_ignore_length", None) is not None), None
        ),
    )


def _stage(processor: Any) -> tuple[Any, ...]:
    kind = type(processor)
    name = kind.__name__
    if kind.__module__ != PROCESSORS_MODULE or name not in (*SCALARS, *MINIMUM_LENGTH):
        raise Untraceable(f"logits processor {name}")
    ignored = getattr(processor, "prompt_ignore_length", None)
    if ignored is not None and not isinstance(ignored, torch.Tensor):
        raise Untraceable("repetition penalty with a number of prompt tokens to ignore")
    return (
        name,
        ignored is not None,
        *(getattr(processor, attribute, None) for attribute in BAKED.get(name, ())),
    )


def eos_ids(holder: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of a criterion or processor of transformers, which holds a tensor, a list or an int."""
    ids = holder.eos_token_id
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


class TokensSoFar(NamedTuple):
    """What processors may look at beside the scores.

    Attributes:
        ids: int64 `[rows, window]`; behind the tokens so far copies of a token that the row has.
        length: int64 scalar, tokens so far.
        ignored: int64 `[rows]`, leading columns that a repetition penalty does not count.
    """

    ids: torch.Tensor
    length: torch.Tensor
    ignored: torch.Tensor


class Stage:
    """A processor of transformers inside the region. Its float, if it has one, is read from the device.

    Args:
        processor: the caller's; it keeps its float.
        device: where the float goes.
    """

    def __init__(self, processor: Any, device: torch.device) -> None:
        self._processor = copy.copy(processor)
        self._attribute = SCALARS[type(processor).__name__]
        self._skips = getattr(processor, "prompt_ignore_length", None) is not None
        self.buffers: list[torch.Tensor] = []
        if self._attribute is not None:
            self.buffers.append(torch.zeros((), dtype=torch.float32, device=device))
            setattr(self._processor, self._attribute, self.buffers[0])
        if self._skips:
            self._processor.prompt_ignore_length = None

    def load(self, processor: Any) -> None:
        """Takes the number of another processor of the same kind."""
        if self._attribute is not None:
            self.buffers[0].fill_(float(getattr(processor, self._attribute)))

    def __call__(self, so_far: TokensSoFar, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]`, processed."""
        ids = so_far.ids
        if self._skips:
            columns = torch.arange(ids.shape[1], device=ids.device)
            skipped = (columns[None, :] < so_far.ignored[:, None]) | (columns[None, :] >= so_far.length)
            # The processor drops an id past the vocabulary.
            ids = ids.masked_fill(skipped, scores.shape[-1])
        processed: torch.Tensor = self._processor(ids, scores)
        return processed


class MinimumLength:
    """Forbids ends of sequence below a length that is read from the device.

    Args:
        slots: room for ids.
        device: where they are.

    Attributes:
        buffers: int64 scalar, the number of tokens, prompt included, from which a row may end; and int64 `[slots]`, the
            ids, with `NO_TOKEN` in unused slots.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.buffers = [
            torch.zeros((), dtype=torch.long, device=device),
            torch.full((slots,), NO_TOKEN, dtype=torch.long, device=device),
        ]

    def load(self, processor: Any) -> None:
        """Takes the numbers of a transformers processor."""
        limit, eos = self.buffers
        if type(processor).__name__ == "MinLengthLogitsProcessor":
            limit.fill_(processor.min_length)
        else:
            limit.fill_(processor.prompt_length_to_skip + processor.min_new_tokens)
        load_ids(eos, eos_ids(processor))

    def __call__(self, so_far: TokensSoFar, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]` with the ends of sequence at minus infinity below the limit."""
        limit, eos = self.buffers
        vocabulary = torch.arange(scores.shape[-1], device=scores.device)
        ends = (vocabulary[:, None] == eos[None, :]).any(-1)
        return torch.where(ends & (so_far.length < limit), float("-inf"), scores)


def load_ids(slots: torch.Tensor, ids: Sequence[int]) -> None:
    """Fills an id buffer from the front and the rest with `NO_TOKEN`."""
    padded = [*ids, *([NO_TOKEN] * (slots.shape[0] - len(ids)))]
    slots.copy_(torch.tensor(padded, dtype=slots.dtype, device=slots.device))


class Chooser:
    """Selects the tokens of one step; one object serves the prompt's token eagerly and the region's inside the graph.

    Args:
        request: the first call with this selection.
        device: where the scalars live.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        self.selection = request.selection
        self.eos = torch.full((self.selection.eos_slots,), NO_TOKEN, dtype=torch.long, device=device)
        self.pad = torch.zeros((), dtype=torch.long, device=device)
        self._stages = [
            MinimumLength(self.selection.eos_slots, device)
            if type(processor).__name__ in MINIMUM_LENGTH
            else Stage(processor, device)
            for processor in request.processors
        ]

    def static_buffers(self) -> list[torch.Tensor]:
        """Everything that a graph reads from this object."""
        return [self.eos, self.pad, *(buffer for stage in self._stages for buffer in stage.buffers)]

    def load(self, request: Request) -> None:
        """Takes the numbers of a call with the same selection."""
        load_ids(self.eos, request.eos)
        self.pad.fill_(request.pad)
        for processor, stage in zip(request.processors, self._stages, strict=True):
            stage.load(processor)

    def process(self, so_far: TokensSoFar, logits: torch.Tensor) -> torch.Tensor:
        """Runs the processors in order.

        Args:
            so_far: the tokens of each row.
            logits: float32 `[rows, vocabulary]`.

        Returns:
            float32 scores `[rows, vocabulary]`.
        """
        scores = logits
        for stage in self._stages:
            scores = stage(so_far, scores)
        return scores

    def choose(
        self, scores: torch.Tensor, noise: torch.Tensor | None, finished: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Picks a token a row.

        Args:
            scores: float32 `[rows, vocabulary]`.
            noise: exponentially distributed float32 `[rows, vocabulary]` when sampling.
            finished: bool `[rows]`, rows that have ended.

        Returns:
            int64 tokens `[rows]`, bool `[rows]` finished from now on, and a bool scalar: these scores are no
            distribution (transformers' sampling would raise on them).
        """
        if noise is None:
            tokens = scores.argmax(-1)
            broken = torch.zeros((), dtype=torch.bool, device=scores.device)
        else:
            # An exponential draw of exactly zero would give plus infinity, also to a forbidden token's neighbour:
            # keep it finite.
            gumbel = -noise.clamp_min(torch.finfo(torch.float32).tiny).log()
            tokens = (scores + gumbel).argmax(-1)
            broken = (~scores.gather(-1, tokens[:, None])[:, 0].isfinite() & ~finished).any()
        tokens = torch.where(finished, self.pad, tokens)
        ended = (tokens[:, None] == self.eos[None, :]).any(-1)
        return tokens, finished | ended, broken
