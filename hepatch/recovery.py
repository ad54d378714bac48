"""Recovery: whatever goes wrong after the prompt, the same call ends with the right tokens.

One mechanism for all failures: transformers' own `_sample`, with the processors and criteria that were prepared for
this call, over the ids and mask extended by the tokens produced so far, and the fresh cache that transformers prepared
and a region never touches.

Where DeepSpeed's containers run, and still run, the same loop starts at the prompt instead, with the tokens so far
forced: then keys and values come about step by step as the eager engine makes them, and so do its very tokens.

A second `generate` would be wrong: it takes finished rows for live ones, shows the prompt to the streamer again and
shifts `min_new_tokens`. Rows that have finished are marked so by a criterion at the first recovered token and padded
there afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hepatch.generate_call import GenerateCall


class AlreadyFinished:
    """A stopping criterion that stops the rows which had finished before recovery began.

    Args:
        rows: bool `[batch]`.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """bool `[batch]`, the same at every step."""
        return self.rows.to(input_ids.device)


class ResumedStreamer:
    """Shows a streamer, for a finished row, padding instead of what the first step chose.

    Args:
        streamer: what is to be shown.
        rows: bool `[batch]`, rows that had finished.
        pad: the padding id.
    """

    def __init__(self, streamer: Any, rows: torch.Tensor, pad: int) -> None:
        self._streamer = streamer
        self._rows = rows
        self._pad = pad
        self._is_first = True

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens `[batch]` on."""
        if self._is_first:
            value = value.masked_fill(self._rows.to(value.device), self._pad)
        self._is_first = False
        self._streamer.put(value)

    def end(self) -> None:
        """Passes the end on."""
        self._streamer.end()


def finish_eagerly(
    original: Callable[..., Any],
    call: GenerateCall,
    ids: torch.Tensor,
    scores: list[torch.Tensor],
    logits: list[torch.Tensor],
    seen: int,
) -> Any:
    """Ends a call on transformers' own path.

    Args:
        original: the bound `_sample`.
        call: the call, as it came.
        ids: int64 `[batch, known]`: the prompt and every token that is certain, on the caller's device.
        scores: float32 `[batch, vocabulary]` for each certain new token, where the caller wants them.
        logits: the same, raw.
        seen: tokens behind the certain ones that a streamer was shown already.

    Returns:
        What `original` would have returned for the whole call.
    """
    assert call.request is not None
    known = ids.shape[1]
    new = known - call.prompt
    finished = _finished(ids[:, call.prompt :], call.request.eos)
    criteria, streamer = call.criteria, call.streamer
    if new and bool(finished.any()):
        criteria = type(criteria)([*criteria, AlreadyFinished(finished)])
    if streamer is not None:
        streamer = ResumedStreamer(SkippedStart(streamer, seen), finished, call.request.pad)
    result = original(
        ids,
        logits_processor=call.processors,
        stopping_criteria=criteria,
        generation_config=call.config,
        streamer=streamer,
        **call.extra,
        **extended(call, new),
    )
    sequences = result.sequences if call.wants_dict else result
    if new and sequences.shape[1] > known:
        sequences[:, known].masked_fill_(finished.to(sequences.device), call.request.pad)
    if call.wants_dict:
        if scores:
            result.scores = (*scores, *(result.scores or ()))
        if logits:
            result.logits = (*logits, *(result.logits or ()))
    return result


class ForcedTokens:
    """A logits processor under which the first tokens come out as they are known already.

    Args:
        known: int64 `[batch, length]`, prompt and tokens.
    """

    def __init__(self, known: torch.Tensor) -> None:
        self.known = known

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """float `[batch, vocabulary]`: certain where the next token is known, else as they come."""
        column = input_ids.shape[1]
        if column >= self.known.shape[1]:
            return scores
        certain = self.known[:, column : column + 1].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, certain, 0.0)


class SkippedStart:
    """A streamer that is not shown again what it has seen.

    Args:
        streamer: the caller's.
        seen: steps whose tokens it has seen.
    """

    def __init__(self, streamer: Any, seen: int) -> None:
        self._streamer = streamer
        self._left = seen

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens `[batch]` on."""
        if self._left:
            self._left -= 1
        else:
            self._streamer.put(value)

    def end(self) -> None:
        """Passes the end on."""
        self._streamer.end()


class LayersStreamer:
    """A streamer that finds the model with its own layers, as it does while a region serves, though containers run.

    Args:
        streamer: the caller's.
        aside: makes what is held while the model has its own layers.
    """

    def __init__(self, streamer: Any, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._streamer, self._aside = streamer, aside

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens `[batch]` on."""
        with self._aside():
            self._streamer.put(value)

    def end(self) -> None:
        """Passes the end on."""
        with self._aside():
            self._streamer.end()


def start_again(
    original: Callable[..., Any],
    call: GenerateCall,
    ids: torch.Tensor,
    scores: list[torch.Tensor],
    streamer: Any,
    seen: int,
) -> Any:
    """Runs a call from its prompt once more, and makes the tokens that are certain come out again.

    Args:
        original: the bound `_sample`.
        call: the call, as it came.
        ids: int64 `[batch, known]`: the prompt and every token that is certain.
        scores: float32 `[batch, vocabulary]` for each certain new token, where the caller wants them.
        streamer: the caller's, or None.
        seen: new tokens that it was shown already.

    Returns:
        What `original` would have returned.
    """
    result = original(
        call.input_ids,
        logits_processor=type(call.processors)([*call.processors, ForcedTokens(ids)]),
        stopping_criteria=call.criteria,
        generation_config=call.config,
        streamer=None if streamer is None else SkippedStart(streamer, seen),
        **call.extra,
        **call.model_kwargs,
    )
    if call.wants_dict and scores:
        result.scores = (*scores, *result.scores[len(scores) :])
    return result


def extended(call: GenerateCall, new: int) -> dict[str, Any]:
    """The model's arguments as they would stand after `new` tokens, before any forward."""
    kwargs = dict(call.model_kwargs)
    # transformers derives it anew from the cache, which is empty.
    kwargs.pop("cache_position", None)
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], new)], dim=-1)
    positions = kwargs.get("position_ids")
    if positions is not None:
        ahead = torch.arange(1, new + 1, device=positions.device)
        kwargs["position_ids"] = torch.cat([positions, positions[:, -1:] + ahead], dim=-1)
    return kwargs


def _finished(new_ids: torch.Tensor, eos: tuple[int, ...]) -> torch.Tensor:
    """bool `[batch]`: rows that hold an end of sequence among their new tokens."""
    if not eos:
        return torch.zeros(new_ids.shape[0], dtype=torch.bool, device=new_ids.device)
    return torch.isin(new_ids, torch.tensor(eos, device=new_ids.device)).any(-1)
