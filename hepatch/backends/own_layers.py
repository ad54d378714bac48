"""The native backend of one engine: the model's own layers over a static KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hepatch import probes
from hepatch.backends.backend import Backend
from hepatch.backends.static_kv import grown
from hepatch.region_store import BucketLeases

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from hepatch.backends import KV
    from hepatch.settings import Settings


class OwnLayers(Backend):
    """An engine whose model runs its own layers.

    Args:
        model: the causal LM, or None where the engine has none.
        no_containers: why it has no containers, where hepatch decided that.
    """

    name = "native"

    def __init__(self, model: Any, no_containers: str | None) -> None:
        self._model, self._no_containers = model, no_containers

    def obstacle(self) -> str | None:
        """What keeps the model from a static cache, as far as its class and configuration tell."""
        if self._model is None:
            return "there is no model"
        obstacle = probes.static_cache_obstacle(self._model)
        if obstacle is None or self._no_containers is None:
            return obstacle
        return f"{obstacle}, and {self._no_containers}"

    def facts(self, rows: int | None, weights: list[torch.Tensor], settings: Settings) -> dict[str, Any]:
        """Why there are no containers, where they were asked for."""
        return {"no_kernels": self._no_containers if settings.backend == "kernels" else None}

    def moving_memory(self, kv: KV, weights: list[torch.Tensor]) -> Hashable:
        """Weights stay where they are over optimizer steps, move with `offload_states`; the cache moves as it grows."""
        return kv.generation, probes.addresses(weights)

    def leases(self, settings: Settings) -> BucketLeases:
        """A graph serves the positions of a bucket."""
        return BucketLeases(settings.bucket_tokens)

    def most_recordings(self, settings: Settings) -> int:
        """`HEPATCH_MAX_RECORDINGS`."""
        return settings.max_recordings

    def needed_bytes(self, kv: KV | None, rows: int, length: int, settings: Settings) -> int:
        """The static cache as `StaticKV.reserve` will have it."""
        weight = None if self._model is None else next(self._model.parameters(), None)
        if weight is None:
            return 0
        lease = self.leases(settings).lease(rows)
        tokens = grown(0 if kv is None else kv.tokens, lease.rows * lease.window(length))
        return tokens * probes.kv_bytes_per_token(self._model, weight.dtype)

    def nbytes(self, kv: KV | None) -> int:
        """The static cache."""
        return 0 if kv is None else kv.nbytes
