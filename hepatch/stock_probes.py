"""What stock DeepSpeed would do on this machine with this model, asked of its own code. Nothing is built or compiled.

A sibling of `probes.py`, and like it the only place of the private names that it uses. Behaviour is asked, versions are
never compared: the functions that decide in `deepspeed.initialize` are run on a model without memory.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_PARAMETERS_TRIED = 200_000_000
"""Parameters of a one-layer model that is still run on the CPU to see what its layer returns."""


class Policies(NamedTuple):
    """What stock's own choice of inference containers comes to.

    Attributes:
        layers: classes of the model's layers that would get a container.
        error: what the choice itself raised, None where nothing.
    """

    layers: tuple[type, ...] = ()
    error: str | None = None


def op_obstacles() -> dict[str, str]:
    """Why DeepSpeed's inference op cannot be built here, by name; empty where nothing stands against it.

    Names: "no-cuda", "no-nvcc", "arch-list", "incompatible". The op is neither built nor loaded.

    Source: ``deepspeed.ops.op_builder.builder.installed_cuda_version`` (runs `nvcc -V`),
    ``deepspeed.ops.op_builder.transformer_inference.InferenceBuilder.compute_capability_args`` (reads
    TORCH_CUDA_ARCH_LIST as integers) and ``is_compatible``.
    """
    from deepspeed.ops.op_builder import builder, transformer_inference

    found: dict[str, str] = {}
    if not torch.cuda.is_available():
        found["no-cuda"] = "torch finds no CUDA device, and the op has no CPU implementation"
    try:
        builder.installed_cuda_version()
    except Exception as error:  # noqa: BLE001 - whatever it is, the op cannot be built
        found["no-nvcc"] = f"no CUDA compiler: {error}"
    op = transformer_inference.InferenceBuilder()
    op.jit_mode = True
    try:
        op.compute_capability_args()
    except ValueError as error:
        found["arch-list"] = f"TORCH_CUDA_ARCH_LIST has an entry that DeepSpeed cannot read: {error}"
    except RuntimeError as error:
        # Without a device and without a list there is no architecture to build for; the first entry says so already.
        if "no-cuda" not in found:
            found["arch-list"] = str(error)
    if not found and not op.is_compatible():
        found["incompatible"] = (
            f"DeepSpeed calls it incompatible: {getattr(op, 'error_log', None) or 'no reason given'}"
        )
    return found


def policies(model: torch.nn.Module) -> Policies:
    """The layers of a model that stock would replace, by running stock's own choice.

    Args:
        model: any model; it may lie on the meta device.

    Source: ``DeepSpeedHybridEngine.populate_all_inference_policies``, which reads `module` and fills
    `inference_policies`; beneath hepatch's wrapper where that is installed.
    """
    engine_class = sys.modules["deepspeed.runtime.hybrid_engine"].DeepSpeedHybridEngine
    original = inspect.unwrap(vars(engine_class)["populate_all_inference_policies"])
    container = object()
    engine = SimpleNamespace(module=model, new_inference_container=container, inference_policies={})
    try:
        with silent("DeepSpeed"):
            original(engine)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - policies raise whatever they like, some of them exit
        return Policies(error=f"{type(error).__name__}: {error}")
    chosen = {kind for kind, (make, *_) in engine.inference_policies.items() if make is container}
    return Policies(tuple({type(module): None for module in model.modules() if type(module) in chosen}))


def layer_returns_tuple(model: Any, layer: type) -> bool | None:
    """Whether a layer of this transformers returns a tuple, as DeepSpeed's containers do; None if that cannot be told.

    A model that expects a tensor from its layers fails in its first generate with a container in their place, and one
    whose layers return tuples takes what a container returns.

    Args:
        model: on the meta device.
        layer: class of its layers.
    """
    for candidate in _runnable(model):
        found: list[bool] = []
        hook = _first(candidate, layer).register_forward_hook(
            lambda _m, _a, out, seen=found: seen.append(type(out) is tuple)
        )
        with contextlib.suppress(Exception), torch.no_grad():
            device = next(candidate.parameters()).device
            candidate(input_ids=torch.zeros(1, 4, dtype=torch.long, device=device), use_cache=False)
        hook.remove()
        if found:
            return found[0]
    return None


def _runnable(model: Any) -> Iterator[Any]:
    """The model as it is, without memory; then one layer of it with a small vocabulary on the CPU, uninitialised."""
    yield model
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size = 1, 64
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    with contextlib.suppress(Exception):
        with torch.device("meta"):
            small = type(model)(config).eval()
        if sum(parameter.numel() for parameter in small.parameters()) <= MOST_PARAMETERS_TRIED:
            yield small.to_empty(device="cpu")


def _first(model: torch.nn.Module, layer: type) -> torch.nn.Module:
    return next(module for module in model.modules() if type(module) is layer)


def graph_obstacle(section: dict[str, Any], zero_stage: int) -> str | None:
    """Why DeepSpeed's own `enable_cuda_graph` would not be in force, by its own check; None where it would.

    Args:
        section: the `hybrid_engine` section of a ds_config.
        zero_stage: the engine's ZeRO stage.

    Source: ``deepspeed.runtime.hybrid_engine_graph.validate_cuda_graph_support`` (DeepSpeed 0.19.6 and later).
    """
    try:
        from deepspeed.runtime.hybrid_engine_graph import validate_cuda_graph_support
    except ImportError:
        return "this DeepSpeed has no decode graphs"
    config = SimpleNamespace(
        release_inference_cache=bool(section.get("release_inference_cache", False)),
        inference_tp_size=int(section.get("inference_tp_size", 1)),
        max_out_tokens=int(section.get("max_out_tokens", 512)),
    )
    reason: str | None = validate_cuda_graph_support(config, zero_stage)
    return reason


def validate_section(section: dict[str, Any]) -> str | None:
    """What DeepSpeed's own config class has against a `hybrid_engine` section; None where nothing.

    Source: ``deepspeed.runtime.config.HybridEngineConfig``, which forbids keys that it does not know.
    """
    from deepspeed.runtime.config import HybridEngineConfig

    try:
        HybridEngineConfig(**section)
    except Exception as error:  # noqa: BLE001 - pydantic's, of whichever version DeepSpeed uses
        return " ".join(str(error).split())
    return None


@contextlib.contextmanager
def silent(logger: str) -> Iterator[None]:
    """Holds back a logger: what stock would warn about is told here in another place."""
    quiet = logging.getLogger(logger)
    before, quiet.disabled = quiet.disabled, True
    try:
        yield
    finally:
        quiet.disabled = before
