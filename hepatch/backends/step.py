"""What every backend's decode step has to do with: where it stands, and which of its logits count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class StepView:
    """What a step knows of where it stands; a `StepState` will do as well.

    Attributes:
        position: int64 `[1]`, the position that the step writes.
        mask: int64 `[window, rows]`; None where it is an argument.
    """

    position: torch.Tensor
    mask: torch.Tensor | None = None


def last_logits(output: Any) -> torch.Tensor:
    """The logits of the last position, `[batch, vocabulary]`."""
    logits: torch.Tensor = output.logits
    return logits[:, -1]
