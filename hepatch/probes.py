"""What the installed torch, deepspeed, transformers and a given model can do.

Every use of an API that its owner calls private is in this file, each with the symbol it rests on, so that a drift of a
host shows here and nowhere else. Behaviour and signatures are probed; versions are never compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hepatch import settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CACHE_KEYWORDS = ("cache", "past_key_values")
TRACEABLE_ATTENTION = ("sdpa", "eager")
FULL_LENGTH_LAYERS = ("full_attention", "sliding_attention")


def generation_model(module: torch.nn.Module) -> Any | None:
    """The model whose `generate` runs, or None: the first `GenerationMixin` in `module`; with PEFT, an inner one."""
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    if mixin is None:
        return None
    for candidate in module.modules():
        if isinstance(candidate, mixin):
            return candidate
    return None


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's own `forward`, read from the class: an instance may carry a wrapped one."""
    return inspect.signature(type(model).forward).parameters


def supports_cache_class(model: Any) -> bool:
    """Whether a model takes its KV cache as an object; else it is a tuple of keys and values.

    Source: ``PreTrainedModel._supports_cache_class`` (transformers 4.44 to 4.56); later releases know only objects.
    """
    return bool(getattr(model, "_supports_cache_class", True))


def cache_keyword(model: Any) -> str:
    """Under which name `forward` takes a KV cache.

    Raises:
        TypeError: it takes none.
    """
    parameters = forward_parameters(model)
    for keyword in CACHE_KEYWORDS:
        if keyword in parameters:
            return keyword
    raise TypeError(f"{type(model).__name__}.forward takes no KV cache ({' or '.join(CACHE_KEYWORDS)})")


def static_cache_obstacle(model: Any) -> str | None:
    """Why this model cannot decode over a static cache, or None.

    Source: ``PreTrainedModel._can_compile_fullgraph`` (transformers 4.54 and later) is transformers' own declaration
    that a model decodes over a static cache in one graph; layered caches (``CacheLayerMixin``) exist since 4.54.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder model"
    if not hasattr(sys.modules.get("transformers.cache_utils"), "CacheLayerMixin"):
        return f"the KV cache of this transformers has no layers to build on, so {name} keeps its dynamic cache"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not declare {name} capable of a compiled static cache"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in TRACEABLE_ATTENTION:
        return f"{name} uses {attention} attention; regions are built for {' and '.join(TRACEABLE_ATTENTION)}"
    other = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - set(FULL_LENGTH_LAYERS))
    if other:
        return f"{name} has layers of the kind {', '.join(other)}, whose state is no KV cache of full length"
    try:
        cache_keyword(model)
    except TypeError as error:
        return str(error)
    return None


def text_config(model: Any) -> Any:
    """The configuration of the decoder.

    Source: ``PreTrainedConfig.get_text_config`` (transformers 4.45 and later); before it a configuration has no parts
    that a causal LM's could be one of.
    """
    config = model.config
    of_decoder = getattr(config, "get_text_config", None)
    return config if of_decoder is None else of_decoder(decoder=True)


def layer_count(model: Any) -> int:
    """How many layers a KV cache of this model has."""
    return int(text_config(model).num_hidden_layers)


def attention_heads(model: Any) -> tuple[int, int]:
    """Heads of the queries, and of keys and values, by the configuration."""
    config = text_config(model)
    heads = int(getattr(config, "num_attention_heads", 1))
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def max_positions(model: Any) -> int | None:
    """The model's number of positions, or None where it has no limit (alibi)."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    return int(positions) if positions else None


def kv_bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """Bytes of KV cache that one token of one row takes, by the configuration."""
    config = text_config(model)
    heads, kv_heads = attention_heads(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * layer_count(model) * kv_heads * int(dim) * dtype.itemsize


# Hooks that change nothing in what a decode step computes, by the module that defines them: DeepSpeed's own;
# transformers' recorder of hidden states, which stays for good after one call and is idle without a collector; and the
# one that gradient_checkpointing_enable() puts on the embedding (``make_inputs_require_grads``).
_IDLE_HOOKS = ("deepspeed.", "transformers.utils.output_capturing", "transformers.modeling_utils")


class Inspection(NamedTuple):
    """What a model is made of at this moment.

    Attributes:
        foreign_hooks: names of modules with forward hooks that a region would have to call.
        idle_hooks: tables that hold only hooks which a step can do without.
        tensors: parameters and buffers.
        structure: a number that changes with modules, their forwards, and the dtypes and shapes of their parameters.
    """

    foreign_hooks: tuple[str, ...]
    idle_hooks: list[dict[int, Any]]
    tensors: list[torch.Tensor]
    structure: int


def inspect_model(model: torch.nn.Module) -> Inspection:
    """Looks a model over, once a generate: nothing else would tell a region of these changes.

    Dynamo does not guard hooks (``torch._dynamo.config.skip_nnmodule_hook_guards``) or a class's forward, so what comes
    after the compilation would silently not run; hooks on the root are not part of `forward` at all.
    """
    foreign: list[torch.nn.Module] = []
    idle: list[dict[int, Any]] = []
    tensors: list[torch.Tensor] = []
    structure: list[Any] = []
    for module in _modules(model):
        kind = type(module)
        structure.append((id(module), id(kind), id(kind.forward), id(module.__dict__.get("forward"))))
        for table in (module._forward_pre_hooks, module._forward_hooks):
            if not table:
                continue
            if all((getattr(hook, "__module__", None) or "").startswith(_IDLE_HOOKS) for hook in table.values()):
                idle.append(table)
            else:
                foreign.append(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                tensors.append(parameter)
                structure.append((parameter.dtype, parameter.shape))
        tensors.extend(buffer for buffer in module._buffers.values() if buffer is not None)
    return Inspection(_names(model, foreign), idle, tensors, hash(tuple(structure)))


def _names(model: torch.nn.Module, modules: list[torch.nn.Module]) -> tuple[str, ...]:
    everywhere = torch.nn.modules.module
    named: list[str] = []
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        named.append("every module (a global hook)")
    if modules:
        names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        named += [names[id(module)] for module in modules]
    return tuple(dict.fromkeys(named))


def _modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """What ``root.modules()`` yields, several times as quickly: this runs at every generate."""
    seen = {id(root): root}
    waiting = [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in seen:
                seen[id(child)] = child
                waiting.append(child)
    return list(seen.values())


def below_autograd() -> Any:
    """A context in which the dispatcher is as in the body of a custom op.

    Source: ``torch._C._AutoDispatchBelowAutograd`` (torch 2.6 to 2.13).
    """
    return torch._C._AutoDispatchBelowAutograd()


def compiler_obstacle(device: torch.device, backend: str) -> str | None:
    """Why Inductor could not build code for this device, or None. A compiler is looked for, not run."""
    if backend != "inductor":
        return None
    if device.type == "cpu":
        from torch._inductor import config as inductor_config

        cxx = inductor_config.cpp.cxx
        names = [name for name in (cxx if isinstance(cxx, (list, tuple)) else (cxx,)) if name]
        if not any(shutil.which(name) for name in (*names, "g++", "clang++")):
            return "no C++ compiler (g++ or clang++) was found, and Inductor needs one on a CPU"
        return None
    if not any(shutil.which(name) for name in (*filter(None, (settings.c_compiler(),)), "cc", "gcc", "clang")):
        return "no C compiler (cc, gcc or clang) was found, and Triton needs one"
    return None


def autocast_dtype(device: torch.device) -> str | None:
    """The dtype of the autocast in force for this device, by name, or None."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type))


def is_capturing(device: torch.device) -> bool:
    """Whether somebody is capturing a CUDA graph on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_profiling() -> bool:
    """Whether a profiler of torch is recording in this thread.

    Source: ``torch._C._autograd._profiler_enabled`` (torch 2.6 to 2.13); `torch.profiler` and `emit_nvtx` set it.
    """
    asked = getattr(torch._C._autograd, "_profiler_enabled", None)
    # Without it ranges have no names; no call is worth less for that.
    return asked is not None and bool(asked())


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process.

    Source: ``torch._dynamo.utils.counters["stats"]["unique_graphs"]``.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def skipped_graphs() -> int:
    """Compilations for which Inductor gave up CUDA graphs, in this process.

    Source: ``torch._inductor.cudagraph_utils``, which counts each skip in ``counters["inductor"]["cudagraph_skips"]``.
    """
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def recorded_graphs(device: torch.device) -> int:
    """CUDA graphs that graph trees have recorded on this device from this thread.

    Source: ``torch._inductor.cudagraph_trees.CUDAGraphTreeManager.graph_counter``, an `itertools.count` whose next
    value is the number of graphs so far.
    """
    manager = _tree_manager(device)
    return 0 if manager is None else int(next(copy.copy(manager.graph_counter)))


def graph_bytes(device: torch.device) -> int:
    """Bytes of device memory that the pool of the CUDA graph trees holds, from this thread's point of view.

    Source: ``CUDAGraphTreeManager.cuda_graphs_thread_pool`` and the segments of ``torch.cuda.memory.memory_snapshot``.
    """
    manager = _tree_manager(device)
    if manager is None:
        return 0
    pool = tuple(manager.cuda_graphs_thread_pool)
    return sum(
        int(segment["total_size"])
        for segment in torch.cuda.memory.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == pool
    )


def _tree_manager(device: torch.device) -> Any | None:
    if device.type != "cuda":
        return None
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    return trees.get_manager(index, create_if_none_exists=False)


def own_cache(model: Any) -> Any:
    """An empty KV cache of the kind that `generate`, or in transformers 5.0 the model, makes where none is asked for.

    Source: ``GenerationMixin._prepare_cache_for_generation`` makes a ``DynamicCache`` of the decoder's configuration
    (transformers 4.56 and later), of nothing before that.
    """
    from transformers.cache_utils import DynamicCache

    takes_config = "config" in inspect.signature(DynamicCache.__init__).parameters
    return DynamicCache(config=text_config(model)) if takes_config else DynamicCache()


def mark_callers_cache(model_kwargs: Mapping[str, Any]) -> None:
    """Marks a KV cache among the arguments of a generate as the caller's, before transformers adds one of its own.

    Source: ``GenerationMixin._prepare_cache_for_generation`` does the same in transformers 5.17 and 5.24; in 4.57 and
    5.0 it leaves the caller's cache as it is.
    """
    for keyword in CACHE_KEYWORDS:
        # A tuple, the form of old, takes no attribute; transformers makes a cache with tokens of it.
        with contextlib.suppress(AttributeError):
            if model_kwargs.get(keyword) is not None:
                model_kwargs[keyword]._is_user_defined = True


def user_gave_cache(cache: Any) -> bool:
    """Whether the KV cache in a call is the caller's own.

    Source: ``GenerationMixin._prepare_cache_for_generation`` marks such a cache with ``_is_user_defined`` (seen in
    transformers 5.17 and 5.24), and `mark_callers_cache` does where it does not. A cache that holds tokens is the
    caller's wherever it comes from.
    """
    if getattr(cache, "_is_user_defined", False):
        return True
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return bool(length)


def addresses(tensors: Iterable[torch.Tensor]) -> int:
    """One number that changes when the memory of any tensor moves."""
    return hash(tuple(tensor.data_ptr() for tensor in tensors))


def vocabulary(model: Any) -> int:
    """Width of the logits."""
    head = model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is not None:
        return int(head.weight.shape[0])
    return int(text_config(model).vocab_size)


def engine_facts(engine: Any) -> dict[str, Any]:
    """What a hybrid engine's configuration and construction decide, under the names of `hepatch.facts.Facts`.

    Source: ``DeepSpeedEngine._config`` (``zero_config.stage``, ``hybrid_engine``, ``_param_dict``: the raw ds_config)
    and ``DeepSpeedHybridEngine._inference_containers``.
    """
    config = engine._config
    section = (getattr(config, "_param_dict", None) or {}).get("hybrid_engine") or {}
    return {
        "requested": settings.graph_capture_requested(section),
        "zero_stage": int(config.zero_config.stage),
        "release_inference_cache": bool(config.hybrid_engine.release_inference_cache),
        "inference_tp_size": int(config.hybrid_engine.inference_tp_size),
        "containers": len(getattr(engine, "_inference_containers", ())),
    }


def weights_offloaded(engine: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some weight is not where the engine computes, as after ``engine.offload_states``."""
    device = torch.device(str(engine.device))
    return any(parameter.device.type != device.type for parameter in parameters)


def set_aside_decode_graphs(engine: Any) -> Any | None:
    """Takes DeepSpeed's own decode graphs out of an engine and returns them; None where there are none.

    Source: ``DeepSpeedHybridEngine._decode_graphs`` and ``_orig_module_forward`` (DeepSpeed 0.19.6 and later): `eval`
    sets ``module.forward`` to the former, `train` puts the latter back.
    """
    graphs = engine.__dict__.get("_decode_graphs")
    if graphs is None:
        return None
    engine._decode_graphs = None
    if engine.module.__dict__.get("forward") is graphs:
        engine.module.forward = engine._orig_module_forward
    return graphs


def give_back_decode_graphs(engine: Any, graphs: Any) -> None:
    """Undoes `set_aside_decode_graphs`; the graphs act from the engine's next `eval`."""
    engine._decode_graphs = graphs


def pad_token(config: Any) -> int | None:
    """The padding id of a prepared generation config.

    Source: ``GenerationMixin._prepare_special_tokens`` keeps it as the tensor ``_pad_token_tensor``.
    """
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        pad = config.pad_token_id
    return None if pad is None else int(pad)


def is_plain_dynamic_cache(cache: Any) -> bool:
    """Whether a cache is what transformers prepares when nothing special is asked."""
    return type(cache).__name__ == "DynamicCache" and not getattr(cache, "offloading", False)


def generate_output(sequences: torch.Tensor, **parts: Any) -> Any:
    """transformers' dict output of a decoder-only model.

    Args:
        sequences: int64 `[batch, length]`.
        **parts: `scores`, `logits` and `cache`; the last goes by whichever name the installed class has for it.
    """
    output_class = sys.modules["transformers.generation.utils"].GenerateDecoderOnlyOutput
    cache = parts.pop("cache")
    names = output_class.__dataclass_fields__
    keyword = next(name for name in CACHE_KEYWORDS if name in names)
    return output_class(sequences=sequences, attentions=None, hidden_states=None, **{keyword: cache}, **parts)


def attention_registries() -> tuple[Any, Any, Any]:
    """transformers' registry of attention functions, its registry of mask functions, and its boolean mask function.

    Source: ``transformers.modeling_utils.AttentionInterface``, ``transformers.masking_utils.AttentionMaskInterface``
    and ``sdpa_mask`` there, whose result is True where to attend.

    Raises:
        AttributeError, ImportError: this transformers has not all of them.
    """
    from transformers import masking_utils, modeling_utils

    return modeling_utils.AttentionInterface, masking_utils.AttentionMaskInterface, masking_utils.sdpa_mask


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers of a model, in order.

    Source: ``transformers.modeling_layers.GradientCheckpointingLayer`` (transformers 4.53 and later), the base class of
    what a model repeats.
    """
    layer_class = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
    if layer_class is None:
        return []
    return [module for module in model.modules() if isinstance(module, layer_class)]
