"""Stop flags and streamed tokens, read back from the device without waiting for the step in progress.

A flag is copied to pinned memory with an event behind it, every few steps, and looked at when the next copy is due: by
then the device has long passed the event. The lag is a fixed number of steps and never depends on timing, so that how
many steps run, and with it how much randomness a sampling call draws, is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from hepatch.step_state import StepState


@dataclass(frozen=True)
class Outcome:
    """What the flags say.

    Args:
        ended: length of the sequence at which every row had ended, 0 while one goes on.
        broken: length at which scores were first no distribution, 0 if never.
    """

    ended: int = 0
    broken: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was broken before the last row ended."""
        return not self.broken or 0 < self.ended < self.broken

    @property
    def stops(self) -> bool:
        """Whether no further step is needed."""
        return bool(self.ended or self.broken)


class WatchedStreamer:
    """The caller's streamer. What it raises is the caller's affair and is told apart from a failure of ours.

    Args:
        streamer: transformers' streamer.
        lock: held by whoever shows a token, and free while the streamer looks at it: it may wait for another thread.

    Attributes:
        raised: what it raised, or None.
        puts: how often it was shown something.
    """

    def __init__(self, streamer: Any, lock: threading.RLock) -> None:
        self._streamer = streamer
        self._lock = lock
        self.raised: BaseException | None = None
        self.puts = 0

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens `[batch]` on."""
        self.puts += 1
        self._pass_on(self._streamer.put, value)

    def end(self) -> None:
        """Passes the end on."""
        self._pass_on(self._streamer.end)

    def _pass_on(self, to: Callable[..., Any], *values: torch.Tensor) -> None:
        self._lock.release()
        try:
            to(*values)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self._lock.acquire()


class Readback:
    """Reads flags, and for a streamer the tokens of each step.

    Args:
        state: the batch's buffers.
        batch: rows of the caller.
        every: steps between two reads; a streamer wants every one.
        streamer: transformers' streamer, or None.
        shown: columns that the streamer has seen, the prompt's.
    """

    def __init__(self, state: StepState, batch: int, every: int, streamer: Any, shown: int) -> None:
        self._state = state
        self._batch = batch
        self._every = 1 if streamer is not None else every
        self._streamer = streamer
        self._steps = 0
        self.shown = shown
        pinned = state.device.type == "cuda"
        # The device is said, since torch.set_default_device may name another, where nothing can be pinned.
        self._status = torch.zeros(2, dtype=torch.long, device="cpu", pin_memory=pinned)
        self._tokens = torch.zeros(batch, dtype=torch.long, device="cpu", pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None
        self._pending = False

    def after_step(self) -> Outcome:
        """Called once a token: what was known at the previous read, and orders the next one when it is due."""
        self._steps += 1
        if self._steps % self._every:
            return Outcome()
        outcome = self._collect()
        if not outcome.stops:
            self._order()
        return outcome

    def finish(self) -> Outcome:
        """What the flags say after the last step; everything is read."""
        outcome = self._collect()
        if not outcome.stops and self._steps % self._every:
            self._order()
            outcome = self._collect()
        return outcome

    def _order(self) -> None:
        self._status.copy_(self._state.status, non_blocking=True)
        if self._streamer is not None:
            self._tokens.copy_(self._state.tokens[: self._batch, 0], non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._pending = True

    def _collect(self) -> Outcome:
        if not self._pending:
            return Outcome()
        if self._event is not None:
            self._event.synchronize()
        self._pending = False
        ended, broken = self._status.tolist()
        if self._streamer is not None and not broken and (not ended or self.shown < ended):
            self._streamer.put(self._tokens.clone())
            self.shown += 1
        return Outcome(ended, broken)
