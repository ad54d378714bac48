"""What DeepSpeed's inference containers are made of: every use of their internals is in this file.

Source of all of it: deepspeed/runtime/hybrid_engine.py, deepspeed/module_inject/ and
deepspeed/ops/transformer/inference/ (0.16.9 to 0.19.8). Behaviour and attributes are probed; versions are never
compared.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hepatch import stock_probes

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRANSFORMER = "deepspeed.model_implementations.transformers.ds_transformer"
_ATTENTION = "deepspeed.ops.transformer.inference.ds_attention"
_MLP = "deepspeed.ops.transformer.inference.ds_mlp"
_WORKSPACE = "deepspeed.ops.transformer.inference.op_binding.workspace"
_HYBRID_CONTAINER = "deepspeed.module_inject.containers.features.hybrid_engine"
_MEBI = 2**20
# The kernels keep heads in memory padded to one of these sizes, larger ones as they are
# (ops/csrc/transformer/inference/includes/inference_context.h, InferenceContext::GenWorkSpace).
_HEAD_SIZES = (32, 64, 128)
_ACTIVATIONS = 10
_SPARE_BYTES = 500 * _MEBI
# What containers fuse, and out of which weights (features/split_qkv.py, features/gated_mlp.py).
_FUSED = {
    "qkvw": ("qw", "kw", "vw"),
    "qkvb": ("qb", "kb", "vb"),
    "_h4h_w": ("inter_up_w", "inter_gate_w"),
    "_h4h_b": ("inter_up_b", "inter_gate_b"),
}


class ClassState(NamedTuple):
    """What containers keep on their classes: counters, buffers and the workspace that all of them share."""

    layers: int
    attentions: int
    workspace: Any
    qkv_buffers: list[torch.Tensor]
    mlp_buffers: list[torch.Tensor]


def _classes() -> tuple[Any, Any, Any]:
    return (
        importlib.import_module(_TRANSFORMER).DeepSpeedTransformerInference,
        importlib.import_module(_ATTENTION).DeepSpeedSelfAttention,
        importlib.import_module(_MLP).DeepSpeedMLP,
    )


def class_state() -> ClassState:
    """What the container classes hold now."""
    layer, attention, mlp = _classes()
    return ClassState(
        layer.layer_id, attention.num_layers, layer.workspace, attention._qkv_buffers, mlp._inter_w_buffers
    )


def set_class_state(state: ClassState) -> None:
    """Puts back what `class_state` returned."""
    layer, attention, mlp = _classes()
    layer.layer_id, attention.num_layers, layer.workspace = state.layers, state.attentions, state.workspace
    attention._qkv_buffers, mlp._inter_w_buffers = state.qkv_buffers, state.mlp_buffers


def fresh_class_state() -> ClassState:
    """The state of a process in which no container was ever built."""
    return ClassState(0, 0, None, [], [])


def layer_policies(engine: Any, populate: Any) -> dict[type, tuple[Any, Any]]:
    """DeepSpeed's policies for decoder layers: layer class to builder and policy.

    Args:
        engine: a `DeepSpeedHybridEngine` under construction.
        populate: stock's `populate_all_inference_policies`, bound to it.

    Raises:
        Exception: whatever a policy raises; SystemExit too.
    """
    # Stock and its policies print and warn about what comes of a model without containers; here something else does.
    with stock_probes.silent("DeepSpeed"), contextlib.redirect_stdout(io.StringIO()):
        populate()
    return {
        layer: policy
        for layer, policy in engine.inference_policies.items()
        if isinstance(policy, tuple) and policy and policy[0] == engine.new_inference_container
    }


def rearranges_weights(container: Any) -> bool:
    """Whether a container turns the model's weights around for inference and back for training, in place."""
    base = importlib.import_module(_HYBRID_CONTAINER).HybridEngineContainer
    return type(container).transform_for_inference is not base.transform_for_inference


def lora_weights(module: torch.nn.Module) -> list[Any]:
    """The LoRA weights that a container would fuse for this module, empty if it has none of DeepSpeed's kind."""
    policy = importlib.import_module("deepspeed.module_inject.policy")
    found = policy.maybe_get_lora(module)
    return list(found)


def reads_counter_in_python(container: Any) -> bool:
    """Whether attention runs as DeepSpeed's torch fallback, whose counter is a Python object, and not as a kernel."""
    return inspect.ismethod(container.module.attention.score_context_func.softmax_context_func)


def seen_tokens(module: Any) -> int:
    """How long the layer took the sequence to be in its latest run: the length of the keys that it returned."""
    return int(module.layer_past[0].shape[2])


class PythonCounter:
    """The counter of the torch fallbacks."""

    def warm_up(self) -> None:
        """Nothing: no stream has to be known."""

    def put(self, tokens: int) -> None:
        """Makes `tokens` what the next layer sees."""
        importlib.import_module(_WORKSPACE).InferenceContext.Instance().reset_tokens(tokens)

    def capacity(self) -> int:
        """Positions that the workspace has."""
        return int(importlib.import_module(_WORKSPACE).InferenceContext.Instance().get_max_tokens_num())


class _Mark:
    """Stands for True, and is told from any other."""


class KernelCounter:
    """The counter of the CUDA kernels, which Python cannot set.

    An attention op over a prompt of `n` tokens sets it to `n`. Captured into a graph that is thrown away, the op runs
    on the host alone: the counter moves, the device sees nothing. One capture suffices for any distance, in either
    direction.

    Args:
        container: the first of the engine's containers.

    Source: ``ds_softmax_context`` in ops/csrc/transformer/inference/csrc/pt_binding.cpp: ``reset_tokens(seq_len)``
    where ``seq_len > 1``; the last layer calls ``advance_tokens()`` after it.
    """

    def __init__(self, container: Any) -> None:
        self._attention = container.module.attention
        # With a single layer the first is the last, and moves the counter on by itself.
        self._ahead = 1 if type(self._attention).num_layers == 1 else 0
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self) -> None:
        """Runs one op on the stream of the captures, once. It writes two positions, so only before a prompt.

        A cuBLAS handle that has not run on a stream cannot be captured there.
        """
        if self._stream is not None:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._attend(self._prompt(2))
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._stream = stream

    def put(self, tokens: int) -> None:
        """Makes `tokens`, at least 3, what the next layer sees."""
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Made before the capture: within it, it would take memory for the graph alone, which stays reserved.
            prompt = self._prompt(tokens - self._ahead)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._attend(prompt)
            finally:
                graph.capture_end()
        graph.reset()

    def capacity(self) -> int:
        """Positions that the workspace really has: fewer than were asked for where memory was short.

        Runs one op, which writes two positions, so only before a prompt.

        Source: ``ds_softmax_context`` returns keys `[batch, heads, tokens, dim]` over memory that has
        ``GetMaxTokenLength()`` positions a head.
        """
        _, keys, _ = self._attend(self._prompt(2))
        return int(keys.stride(1) // keys.stride(2))

    def _prompt(self, tokens: int) -> torch.Tensor:
        """Queries, keys and values of one row, `[1, tokens, width]`; whatever they are."""
        attention = self._attention
        groups = 3 * attention.num_attention_heads_per_partition
        if attention.num_kv_partition > 0:
            groups = attention.num_attention_heads_per_partition + 2 * attention.num_kv_partition
        width = groups * attention.hidden_size_per_attention_head
        return torch.zeros(1, tokens, width, dtype=attention.config.dtype, device="cuda")

    def _attend(self, prompt: torch.Tensor) -> Any:
        """Context, keys and values of an attention op over a prompt."""
        return self._attention.compute_attention(
            qkv_out=prompt,
            input_mask=None,
            layer_past=None,
            alibi=None,
            is_prompt=True,
            token_idx=None,
            position_ids=None,
        )


def workspace_bytes(container: Any, batch: int, layers: int) -> int:
    """Device memory, in bytes, of a workspace for `batch` rows of `max_out_tokens` positions."""
    config = container.module.config
    head = config.hidden_size // config.heads
    padded = next((size for size in _HEAD_SIZES if head <= size), head) * config.heads
    positions, each = int(config.max_out_tokens), config.dtype.itemsize
    scores = batch * (config.heads // config.mp_size) * positions
    activations = _ACTIVATIONS * padded * batch
    stored = layers * batch * (padded // config.mp_size) * 2
    return int((activations + scores + stored) * positions * each)


def free_unused_memory() -> None:
    """Gives back what torch's allocator keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def room_for_workspace(needed: int, held: int) -> str | None:
    """Why a workspace of `needed` bytes cannot be made where one of `held` bytes is given up for it, or None.

    The kernels do not look whether their allocation succeeded, so it has to be known before.
    """
    free, _ = torch.cuda.mem_get_info()
    if needed + _SPARE_BYTES <= free + held:
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if needed + _SPARE_BYTES <= free + held:
        return None
    return f"DeepSpeed's workspace needs {needed // _MEBI} MiB and {(free + held) // _MEBI} MiB are free"


def allocate_workspace(container: Any, batch: int, prompt: int, layers: int) -> None:
    """Has DeepSpeed's shared workspace made for `batch` rows; a larger one takes the place of what is there.

    Raises:
        RuntimeError: from DeepSpeed, not enough memory.
    """
    config = container.module.config
    container.module.workspace.allocate_workspace(
        config.hidden_size,
        config.heads,
        prompt,
        batch,
        layers,
        config.mp_size,
        config.bigscience_bloom,
        0,
        config.max_out_tokens,
        config.min_out_tokens,
    )


def allow_own_allocation(containers: list[Any], allowed: bool) -> None:
    """Whether the first layer makes a workspace of its own size at its next prompt, as stock's does at its first."""
    for container in containers:
        container.module._should_allocate_workspace = allowed


def workspace_is_allocated(container: Any) -> bool:
    """Whether the shared workspace holds memory, so far as Python knows."""
    workspace = container.module.workspace
    return workspace is not None and bool(workspace.is_allocated())


def mark_workspace(container: Any) -> object:
    """Marks the workspace as made now, and returns the mark; making it anew takes the mark away, releasing it as well.

    Source: ``WorkspaceOp._is_allocated``, which `allocate_workspace` sets to True and `release_workspace` to False.
    """
    mark = container.module.workspace._is_allocated = _Mark()
    return mark


def workspace_mark(container: Any) -> object:
    """The mark of the workspace; True where it was made without one, False where it was released."""
    return container.module.workspace._is_allocated


def fuse_split_weights(container: Any) -> None:
    """Copies the model's split weights into the fused ones that the kernels read, and makes them views of those again.

    Stock does it after each optimizer step. A loaded checkpoint, or a weight that was moved, needs it as well.
    """
    if not all(_lies_within(own, fused) for own, fused in _split_weights(container)):
        container.reset_params()


def _split_weights(container: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The model's own weights that a container fuses, each with what it is fused into."""
    for whole, names in _FUSED.items():
        fused = getattr(container, whole, None)
        for own in (getattr(container, name, None) for name in names):
            if own is not None and fused is not None:
                yield own, fused


def _lies_within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    start = whole.data_ptr()
    return start <= part.data_ptr() < start + max(1, whole.nbytes)


def unlike_weight(container: Any, layer: torch.nn.Module) -> str | None:
    """The name of a weight of the layer that is of another dtype or on another device than its container, or None."""
    dtype = container.module.config.dtype
    devices = {fused.device for _, fused in _split_weights(container)}
    for name, parameter in layer.named_parameters():
        if parameter.dtype != dtype or not devices <= {parameter.device}:
            return name
    return None


def unseen_weight(stock: torch.nn.Module, own: torch.nn.Module) -> str | None:
    """The name of a weight of the model's own module that what stands in for it does not read, or None.

    A parameter that was replaced by another object would leave the stand-in with the old one.
    """
    read = [parameter for parameter in stock.parameters() if parameter is not None]
    for name, parameter in own.named_parameters():
        # DeepSpeed's LoRA weights reach the kernels by being fused into the weight beside them.
        if "lora_" not in name and not any(_lies_within(parameter, whole) for whole in read):
            return name
    return None


def other_modules(engine: Any) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Modules outside the layers for which stock puts its own in, each with what it puts in."""
    return list(zip(engine._orig_modules_others, engine._other_layers, strict=True))
