"""The buffers that a decode step reads and writes, shared by all regions of an engine.

Every buffer has a static address, or Inductor would refuse to graph the step that mutates it, and is passed whole. Indices
and lengths are device tensors, so that nothing about a token is read back on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hepatch.backends.static_kv import make_static

if TYPE_CHECKING:
    from hepatch.backends.static_kv import Capacity


class StepState:
    """What is known of a batch between two steps.

    Attributes:
        tokens: int64 `[rows, 1]`, the newest token of each row.
        position: int64 `[1]`, where that token stands: tokens so far, less one.
        row_positions: int64 `[rows, 1]`, the same without the row's padding.
        mask: int64 `[rows, length]`, 0 where the prompt is padded, 1 elsewhere and behind the prompt.
        ids: int64 `[rows, length]`, prompt and new tokens, and behind them copies of the row's first token.
        finished: bool `[rows]`, rows that have ended.
        status: int64 `[2]`: length at which all rows had ended, length at which scores were first no distribution; 0: never.
        noise: float32 `[rows, vocabulary]`, or None until something is sampled.
        scores, logits: float32 `[rows, vocabulary]`, or None until a caller wants them.
        row_index, position_index: int64 `[rows]` and `[length]`, 0 and up, never written: slices of them carry the key.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capacity: Capacity | None = None
        self.noise: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None

    def reserve(self, capacity: Capacity) -> None:
        """Takes on a capacity; nothing that was held stays."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        rows, length = capacity.allocated
        device = self.device

        def numbers(*shape: int, dynamic: tuple[int, ...]) -> torch.Tensor:
            return make_static(torch.zeros(*shape, dtype=torch.long, device=device), dynamic)

        self.tokens = numbers(rows, 1, dynamic=(0,))
        self.position = numbers(1, dynamic=())
        self.row_positions = numbers(rows, 1, dynamic=(0,))
        self.mask = numbers(rows, length, dynamic=(0, 1))
        self.ids = numbers(rows, length, dynamic=(0, 1))
        self.finished = make_static(torch.zeros(rows, dtype=torch.bool, device=device), (0,))
        self.status = numbers(2, dynamic=())
        self.row_index = torch.arange(rows, device=device)
        self.position_index = torch.arange(length, device=device)
        self.noise = self.scores = self.logits = None

    def want(self, vocabulary: int, *, noise: bool, scores: bool, logits: bool) -> None:
        """Makes room for what a selection needs on top; such buffers stay until the capacity changes."""
        assert self.capacity is not None, "reserve() comes first"
        rows, _ = self.capacity.allocated
        for name, wanted in (("noise", noise), ("scores", scores), ("logits", logits)):
            if wanted and getattr(self, name) is None:
                buffer = torch.ones(rows, vocabulary, dtype=torch.float32, device=self.device)
                setattr(self, name, make_static(buffer, (0,)))

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Takes a prompt.

        Args:
            input_ids: int64 `[batch, prompt]`.
            attention_mask: int64 `[batch, prompt]`, or None where nothing is padded.
            positions: int64 `[batch, prompt]`.
        """
        batch, prompt = input_ids.shape
        self.mask.fill_(1)
        if attention_mask is not None:
            self.mask[:batch, :prompt].copy_(attention_mask)
        self.ids.zero_()
        self.ids[:batch].copy_(input_ids[:, :1].expand(batch, self.ids.shape[1]))
        self.ids[:batch, :prompt].copy_(input_ids)
        self.row_positions.zero_()
        self.row_positions[:batch].copy_(positions[:, -1:] + 1)
        self.tokens.zero_()
        # Rows beyond the batch have ended before they start: they pad a key up and must never hold a call open.
        self.finished.fill_(True)
        self.finished[:batch] = False
        self.status.zero_()
        self.position.fill_(prompt - 1)

    def record(self, rows: torch.Tensor, tokens: torch.Tensor, finished: torch.Tensor, broken: torch.Tensor) -> None:
        """Writes a step's outcome and moves on by one position. Traceable.

        Args:
            rows: int64 `[live rows]`.
            tokens: int64 `[live rows]`, the new tokens.
            finished: bool `[live rows]`.
            broken: bool scalar, the scores were no distribution.
        """
        self.position.add_(1)
        length = self.position + 1
        self.tokens.index_put_((rows,), tokens[:, None])
        self.ids.index_put_((rows, self.position.expand(rows.shape[0])), tokens)
        self.finished.index_put_((rows,), finished)
        reached = torch.cat((finished.all()[None], broken[None]))
        self.status.copy_(torch.where(reached & (self.status == 0), length, self.status))
