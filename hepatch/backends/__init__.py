"""How a model's forward is expressed inside a region. Each backend offers the three parts below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from hepatch.generate_call import Prompt


class KV(Protocol):
    """Where keys and values of a batch are."""

    tokens: int
    """Capacity, rows times positions."""

    generation: int
    """Changes when memory moves."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""

    def reserve(self, tokens: int) -> None:
        """Makes room for rows times positions."""

    def turn(self, rows: int, window: int) -> None:
        """Makes the face for `rows` rows and `window` positions current."""


class Decoder(Protocol):
    """Single decode steps."""

    def notice(self, idle_hooks: list[dict[int, Any]]) -> None:
        """Once a call, before its first step: takes note of the model as it is, hooks among it."""

    def put_back(self) -> None:
        """After an interrupt, at whatever place: the model is as it was noticed."""

    def turn(self) -> None:
        """Takes the faces of the KV cache that are current."""

    def compile(self, backend: str, exact: bool) -> None:
        """Has what is opaque to the step compiled by itself."""

    def signature(self) -> int | None:
        """A number that changes when what a recording has baked in has changed; None where nothing is."""

    def take_ran(self) -> bool:
        """Whether something whose signature counts has run from the host since this was last asked."""

    def begin(self, window: int, *, replay: bool) -> None:
        """A step is about to run; `replay` predicts that no host code will."""

    def end(self, *, replay: bool) -> None:
        """The step is over. Raises where it did not run as predicted."""

    def held(self) -> AbstractContextManager[None]:
        """To be held around every `step`, traced or compiled."""

    def step(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One step, traceable: int64 `[rows, 1]`, `[rows, window]`, `[rows, 1]` to logits `[rows, vocabulary]`."""


class Forward(Protocol):
    """A model's forward by one backend."""

    model: Any
    records_at_once: bool
    """A key is recorded at its first visit; only the first key of all is warmed up."""

    def new_kv(self) -> Any:
        """An empty KV cache."""

    def decoder(self, kv: Any, state: Any) -> Any:
        """Single steps over `kv`."""

    def prefill(self, kv: Any, prompt: Prompt) -> torch.Tensor:
        """Runs a prompt; logits of its last position, `[batch, vocabulary]`."""

    def returned_cache(self, kv: Any, prompt: Prompt, sequences: torch.Tensor) -> Any:
        """A cache of transformers' own kind over `sequences`, for a caller who wants it."""
