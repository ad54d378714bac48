"""The buffers of a batch that a decode step reads and writes beside the KV cache, shared by all regions of an engine.

Indices and lengths are device tensors, so that nothing about a token is read back on the way.
"""

from __future__ import annotations

import torch

from hepatch.sampling import TokensSoFar
from hepatch.static_buffer import StaticBuffer, make_static

_OF_SOME_SELECTIONS = ("noise", "scores", "logits")


class StepState:
    """What is known of a batch between two steps. Tensors are faces for the rows and the window that are current.

    Args:
        device: where the model is.
        vocabulary: width of the logits.
        least_rows: rows for which memory is made at the least, so that no later call of fewer moves it.
        least_tokens: the same for rows times positions.

    Attributes:
        tokens: int64 `[rows, 1]`, the newest token of each row.
        position: int64 `[1]`, where that token stands: tokens so far, less one.
        row_positions: int64 `[rows, 1]`, the same without the row's padding.
        mask: int64 `[window, rows]`, 0 where the prompt is padded, 1 elsewhere and behind the prompt.
        ids: int64 `[window, rows]`, prompt and new tokens, and behind them copies of the row's first token.
        finished: bool `[rows]`, rows that have ended.
        ignored: int64 `[rows]`, leading columns that a repetition penalty does not count.
        status: int64 `[2]`: length when all rows had ended, length when scores were first no distribution; 0: never.
        noise, scores, logits: float32 `[rows, vocabulary]`, or None where the call needs none.
        relocations: how often graphs had to be recorded anew.
    """

    tokens: torch.Tensor
    row_positions: torch.Tensor
    mask: torch.Tensor
    ids: torch.Tensor
    finished: torch.Tensor
    ignored: torch.Tensor

    def __init__(self, device: torch.device, vocabulary: int, *, least_rows: int = 0, least_tokens: int = 0) -> None:
        self.device = device
        self._least_rows, self._least_tokens = least_rows, least_tokens
        self.position = make_static(torch.zeros(1, dtype=torch.long, device=device))
        self.status = make_static(torch.zeros(2, dtype=torch.long, device=device))
        self.noise: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.relocations = 0
        self._vocabulary = vocabulary
        self._memory = {
            name: StaticBuffer(dtype, device, unique=name == "tokens")
            for name, dtype in {
                "tokens": torch.long,
                "row_positions": torch.long,
                "mask": torch.long,
                "ids": torch.long,
                "finished": torch.bool,
                "ignored": torch.long,
                "noise": torch.float32,
                "scores": torch.float32,
                "logits": torch.float32,
            }.items()
        }

    def relocate(self) -> None:
        """Has every graph recorded anew: a buffer that all of them write moves to another address.

        For changes that graphs cannot see, because layers are opaque to them.
        """
        self.relocations += 1
        self._memory["tokens"].relocate()
        self.tokens = self._memory["tokens"].face(self.tokens.shape[0], 1, dynamic=(0,))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are that the current call uses; a recording is of no use once one of its own has moved.

        Where only another selection's have moved a recording is replayed, and must be expected to be.
        """
        return tuple(
            buffer.address
            for name, buffer in self._memory.items()
            if name not in _OF_SOME_SELECTIONS or getattr(self, name) is not None
        )

    def reserve(self, rows: int, tokens: int, *, noise: bool, scores: bool, logits: bool) -> None:
        """Makes room for a call and makes the faces of its rows current.

        Args:
            rows: rows of the key.
            tokens: rows times positions.
            noise: whether the call samples.
            scores: whether the call returns processed scores.
            logits: whether the call returns raw logits.
        """
        for name in ("mask", "ids"):
            self._memory[name].reserve(max(tokens, self._least_tokens))
        for name in ("tokens", "row_positions", "finished", "ignored"):
            self._memory[name].reserve(max(rows, self._least_rows))
        self.tokens = self._memory["tokens"].face(rows, 1, dynamic=(0,))
        self.row_positions = self._memory["row_positions"].face(rows, 1, dynamic=(0,))
        self.finished = self._memory["finished"].face(rows, dynamic=(0,))
        self.ignored = self._memory["ignored"].face(rows, dynamic=(0,))
        for name, wanted in zip(_OF_SOME_SELECTIONS, (noise, scores, logits), strict=True):
            face = None
            if wanted:
                self._memory[name].reserve(max(rows, self._least_rows) * self._vocabulary)
                face = self._memory[name].face(rows, self._vocabulary, dynamic=(0,))
            setattr(self, name, face)

    def turn(self, rows: int, window: int) -> None:
        """Makes the face for `window` positions current; what is stored stays."""
        self.mask = self._memory["mask"].face(window, rows, dynamic=(0, 1))
        self.ids = self._memory["ids"].face(window, rows, dynamic=(0, 1))

    def begin(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        positions: torch.Tensor,
        ignored: torch.Tensor | None,
    ) -> None:
        """Takes a prompt. The current face must hold the whole call.

        Args:
            input_ids: int64 `[batch, prompt]`.
            attention_mask: int64 `[batch, prompt]`, or None where nothing is padded.
            positions: int64 `[batch, prompt]`.
            ignored: int64 `[batch]`, or None where a repetition penalty counts everything.
        """
        batch, prompt = input_ids.shape
        self.mask.fill_(1)
        if attention_mask is not None:
            self.mask[:prompt, :batch].copy_(attention_mask.t())
        self.ids.zero_()
        self.ids[:, :batch].copy_(input_ids[:, 0].expand(self.ids.shape[0], batch))
        self.ids[:prompt, :batch].copy_(input_ids.t())
        self.row_positions.zero_()
        self.row_positions[:batch].copy_(positions[:, -1:] + 1)
        self.tokens.zero_()
        # Rows beyond the batch have ended before they start: they pad a key up and must never hold a call open.
        self.finished.fill_(True)
        self.finished[:batch] = False
        self.ignored.zero_()
        if ignored is not None:
            self.ignored[:batch].copy_(ignored)
        self.status.zero_()
        if self.noise is not None:
            self.noise.fill_(1.0)
        self.position.fill_(prompt - 1)

    def record(self, tokens: torch.Tensor, finished: torch.Tensor, broken: torch.Tensor) -> None:
        """Writes a step's outcome and moves on by one position. Traceable.

        Args:
            tokens: int64 `[rows]`, the new tokens.
            finished: bool `[rows]`.
            broken: bool scalar, the scores were no distribution.
        """
        self.position.add_(1)
        self.tokens.copy_(tokens[:, None])
        self.ids.index_copy_(0, self.position, tokens[None])
        self.finished.copy_(finished)
        reached = torch.stack((finished.all(), broken))
        self.status.copy_(torch.where(reached & (self.status == 0), self.position + 1, self.status))

    def tokens_so_far(self) -> TokensSoFar:
        """What the processors look at. Traceable."""
        return TokensSoFar(self.ids.t(), self.position[0] + 1, self.ignored)

    def sequences(self, batch: int, length: int) -> torch.Tensor:
        """A copy of the first `length` tokens of each row, int64 `[batch, length]`."""
        return self.ids[:length, :batch].t().contiguous()
