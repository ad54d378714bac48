"""The position ledger: predict, verify, recover.

DeepSpeed's attention kernel reads how long the sequence is from a counter on the host. A prompt of `n` tokens leaves it
at `n + 1`, every decode step that runs host code moves it by one, and replaying a recorded step moves nothing. So
before a step that will run host code the counter is put where that step needs it, and after every step it is checked
that what
was predicted has happened: host code ran in each layer exactly once, in order, and every layer saw the predicted
number; or, for a replay, in none.

A wrong prediction means that a key or value was written to the wrong place, or that tokens were chosen from a wrong
cache. The ledger then knows nothing until the next prompt, and says so by an error: the step is discarded.

Pure: no torch and no DeepSpeed.
"""

from __future__ import annotations

from typing import Protocol


class LedgerError(RuntimeError):
    """The kernels' counter is not known any more, or host code ran where none was expected; the message says which."""


class HostCounter(Protocol):
    """The counter of the kernels."""

    def put(self, tokens: int) -> None:
        """Makes `tokens` what the next layer sees, without touching what is stored on the device."""


class PositionLedger:
    """What the kernels' host counter is, one step at a time.

    Args:
        host: the counter itself.
        layers: containers that a step runs through.

    Attributes:
        counter: what the next layer will see: tokens of a row including the one at hand. None: not known.
        moves: how often the counter had to be put somewhere, for the report.
    """

    def __init__(self, host: HostCounter, layers: int) -> None:
        self._host = host
        self._layers = layers
        self.counter: int | None = None
        self.moves = 0
        self._expected: int | None = None
        self._seen: list[tuple[int, int]] = []

    def prompt(self, tokens: int) -> None:
        """A prompt of `tokens` columns has run through every container."""
        self.counter = tokens + 1
        self._expected = None
        self._seen.clear()

    def begin(self, tokens: int, *, replay: bool) -> None:
        """A step is about to run.

        Args:
            tokens: tokens of a row including the one that the step reads.
            replay: whether a recording is expected to run, and no host code.

        Raises:
            LedgerError: no prompt has run since the counter was lost.
        """
        if self.counter is None:
            raise LedgerError("the position of the kernels is not known, so no step may run before the next prompt")
        self._expected = tokens
        self._seen.clear()
        if not replay and self.counter != tokens:
            self._host.put(tokens)
            self.counter = tokens
            self.moves += 1

    def ran(self, layer: int, tokens: int) -> None:
        """Host code of a container has run.

        Args:
            layer: which container.
            tokens: how long it took the sequence to be, read back from the keys that it returned.
        """
        self._seen.append((layer, tokens))

    def end(self, *, replay: bool) -> None:
        """The step is over.

        Args:
            replay: as it was in `begin`.

        Raises:
            LedgerError: not what was predicted has happened. The step's outcome is not to be used.
        """
        seen, expected = list(self._seen), self._expected
        self._seen.clear()
        self._expected = None
        if replay:
            if seen:
                self.lose()
                raise LedgerError(
                    f"a recorded step ran host code in {len(seen)} containers, so its positions are in doubt"
                )
            return
        wanted = [(layer, expected) for layer in range(self._layers)]
        if seen != wanted:
            self.lose()
            raise LedgerError(
                f"a step over {expected} tokens ran as {_in_words(seen)} instead of once in each container"
            )
        assert expected is not None
        self.counter = expected + 1

    def lose(self) -> None:
        """Something happened that the ledger cannot follow: nothing is known until the next prompt."""
        self.counter = None
        self._expected = None
        self._seen.clear()


def _in_words(seen: list[tuple[int, int]]) -> str:
    """Which containers ran and what they saw, short enough for one line."""
    if not seen:
        return "no host code at all"
    shown = ", ".join(f"container {layer} at {tokens} tokens" for layer, tokens in seen[:3])
    return shown + (f" and {len(seen) - 3} more" if len(seen) > 3 else "")  # noqa: PLR2004 - three are enough to see it
