"""What every backend's decode step has to do with: where it stands, and which of its logits count."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class StepView:
    """What a step knows of where it stands; a `StepState` will do as well.

    Attributes:
        position: int64 `[1]`, the position that the step writes.
        mask: int64 `[window, rows]`; None where it is an argument.
    """

    position: torch.Tensor
    mask: torch.Tensor | None = None


class IdleHooks:
    """Tables of hooks that a model's steps do without; they may come and go between calls.

    A step fills them again itself, unless Ctrl-C or a signal's handler hits while it does; what then stayed empty is
    the user's model, whose next forward would be wrong without a word.

    Args:
        tables: as they are now.
    """

    def __init__(self, tables: list[dict[int, Any]]) -> None:
        self.notice(tables)

    def notice(self, tables: list[dict[int, Any]]) -> None:
        """Takes note of the tables, once a call, before its first step."""
        self._noticed = [(table, dict(table)) for table in tables]

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Empties the tables for a while: a step does without them, and Dynamo would trace them."""
        with contextlib.ExitStack() as filled_again:
            for table, _ in self._noticed:
                filled_again.callback(table.update, dict(table))
                table.clear()
            yield

    def put_back(self) -> None:
        """Fills the tables again where they stayed empty."""
        for table, hooks in self._noticed:
            table.update(hooks)


def last_logits(output: Any) -> torch.Tensor:
    """The logits of the last position, `[batch, vocabulary]`."""
    logits: torch.Tensor = output.logits
    return logits[:, -1]
