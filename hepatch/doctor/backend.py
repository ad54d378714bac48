"""Which backend would serve a model, guessed before an engine exists from what is known of its containers."""

from __future__ import annotations

from typing import Any

from hepatch import probes, stock_probes
from hepatch.backends.ownership import layers_come_first


def kernels_obstacle(model: Any) -> str | None:
    """Why DeepSpeed's containers would not be admitted for this model; None where they would be tried.

    Admission itself runs them on a disposable copy when an engine is built, which needs the op and a device.

    Args:
        model: on the meta device.
    """
    name = type(model).__name__
    found = stock_probes.policies(model)
    if found.error is not None:
        return f"DeepSpeed's choice of containers for {name} fails ({found.error})"
    if not found.layers:
        return f"DeepSpeed has no container for the layers of {name} of this transformers"
    obstacles = stock_probes.op_obstacles()
    if obstacles:
        return f"DeepSpeed's inference op cannot be built ({'; '.join(obstacles.values())})"
    if stock_probes.layer_returns_tuple(model, found.layers[0]) is False:
        return f"transformers is too new for the container of {found.layers[0].__name__}"
    heads, kv_heads = probes.attention_heads(model)
    return None if heads == kv_heads else f"the containers split the grouped K and V of {name} wrongly"


def choose(backend: str, static_cache: str | None, no_kernels: str | None) -> tuple[str, str | None, str | None]:
    """What would serve, and the facts `static_cache` and `no_kernels` as an engine would have them.

    Args:
        backend: as set, "auto", "kernels" or "native".
        static_cache: why the native backend cannot serve the model; None where it can.
        no_kernels: from `kernels_obstacle`.
    """
    if no_kernels is None and not layers_come_first(backend, static_cache):
        return "kernels", None, None
    if static_cache is None:
        return "native", None, no_kernels if backend == "kernels" else None
    both = static_cache if backend == "native" else f"{static_cache}, and {no_kernels}"
    return "none", both, no_kernels if backend == "kernels" else None
