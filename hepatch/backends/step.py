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


@contextlib.contextmanager
def without_hooks(tables: list[dict[int, Any]]) -> Iterator[None]:
    """Empties tables of hooks for a while: a step does without them, and Dynamo would trace them."""
    with contextlib.ExitStack() as emptied:
        for table in tables:
            emptied.callback(table.update, dict(table))
            table.clear()
        yield


class Undisturbed:
    """What a model's steps do without or replace, as it is between them.

    A step puts it back itself, unless Ctrl-C or a signal's handler hits while it does; what then stayed replaced is the
    user's model, whose next forward would be wrong without a word.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def notice(self, tables: list[dict[int, Any]]) -> None:
        """Takes note of tables of hooks, once a call, before its first step."""
        self._hooks = [(table, dict(table)) for table in tables]

    def put_back(self) -> None:
        """Fills them again where they were emptied."""
        for table, hooks in self._hooks:
            table.update(hooks)


def last_logits(output: Any) -> torch.Tensor:
    """The logits of the last position, `[batch, vocabulary]`."""
    logits: torch.Tensor = output.logits
    return logits[:, -1]
