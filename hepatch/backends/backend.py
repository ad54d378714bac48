"""What a backend is to one engine, around and between the decode steps."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from hepatch.backends import KV, Forward
    from hepatch.generate_call import GenerateCall
    from hepatch.region_store import BucketLeases, ExactLeases
    from hepatch.settings import Settings


class Backend(ABC):
    """One engine's backend. What is not abstract is nothing where a backend has nothing to say.

    Attributes:
        name: as the report has it.
        forward: the model's forward where it is known to be right; None where `admission` has yet to find one.
    """

    name: Literal["kernels", "native"]
    forward: Forward | None = None

    def obstacle(self) -> str | None:
        """Why the model cannot be decoded by this backend at all; None where it can, as far as is known."""
        return None

    @abstractmethod
    def facts(self, rows: int | None, weights: list[torch.Tensor], settings: Settings) -> dict[str, Any]:
        """Fields of `Facts` that are for this backend to say.

        Args:
            rows: of the call; None where there is none.
            weights: the model's, as they are now.
            settings: of the engine.
        """

    def unsupported(self, model_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Why a call is no plain decode step here, one phrase a reason.

        Args:
            model_kwargs: what the caller gives the model.
        """
        return ()

    def step_aside(self) -> None:
        """Lets the model run its own layers, whatever DeepSpeed's train and eval have put in their place."""

    def prepare(self, rows: int, prompt: int, total: int) -> None:
        """Makes room for a call, the KV cache apart; raises where there is none.

        Args:
            rows: of the call.
            prompt: columns of the prompt.
            total: prompt and new tokens.
        """

    def memory(self) -> Hashable:
        """Differs from an earlier answer where everything recorded since is void."""
        return None

    def moving_memory(self, kv: KV, weights: list[torch.Tensor]) -> Hashable:
        """Differs from an earlier answer where recordings have to be made anew, in regions that stay."""
        return None

    def least_sizes(self) -> dict[str, int]:
        """Sizes below which a batch's buffers are not made, as arguments of `StepState`."""
        return {}

    @abstractmethod
    def leases(self, settings: Settings) -> BucketLeases | ExactLeases:
        """What makes the keys of a call."""

    @abstractmethod
    def most_recordings(self, settings: Settings) -> int:
        """The bound on keys."""

    @abstractmethod
    def needed_bytes(self, kv: KV | None, rows: int, length: int, settings: Settings) -> int:
        """Bytes of keys and values that are held once a call is served.

        Args:
            kv: what is held now.
            rows: of the call.
            length: prompt and new tokens.
            settings: of the engine.
        """

    @abstractmethod
    def nbytes(self, kv: KV | None) -> int:
        """Bytes of keys and values that are held now."""

    def engine_generates(self) -> AbstractContextManager[None]:
        """To be held around the engine's own `generate`."""
        return contextlib.nullcontext()

    def serving(self) -> AbstractContextManager[None]:
        """To be held while a region serves a call: the weights are as this backend wants them."""
        return contextlib.nullcontext()

    def own_layers(self) -> AbstractContextManager[None]:
        """To be held while the model's own layers serve a call."""
        return contextlib.nullcontext()

    def from_the_prompt(self, call: GenerateCall, streamer: Any) -> AbstractContextManager[Any] | None:
        """To be held while transformers' loop makes a call anew, its first tokens forced, by what a region would run.

        Args:
            call: the call.
            streamer: the caller's, or None.

        Returns:
            None where going on from the tokens that are there gives no others; else what gives the streamer to use.
        """
        return None

    def suspend(self) -> None:
        """`hepatch.disable()`: leaves everything to stock."""

    def resume(self) -> None:
        """`hepatch.enable()` after `suspend`."""
