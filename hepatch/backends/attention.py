"""Attention of a decode step as one op: stores the new token's key and value and attends over the window.

One op a layer instead of some twenty traced ones halves what is traced and compiled, reads grouped KV heads once
instead of repeating them, and gives the same result run after run, which cuDNN's masked attention does not.

It is reached through transformers' own registry of attention functions: during a step, and only then, the configuration
names `NAME`. The mask is still the model's own (built by transformers' boolean mask function), so windows, padding and
causality are what the model says. A model that hands attention something unknown here, such as sinks, does not pass
admission with this op and keeps its own attention function.

Source: ``AttentionInterface`` (transformers 4.48 and later), ``AttentionMaskInterface`` (4.53 and later), and the
contract of ``sdpa_attention_forward``: query ``[batch, heads, 1, dim]`` in, ``[batch, 1, heads, dim]`` and None out.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hepatch import probes

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "hepatch_decode"
# What models pass to their attention function beside its own arguments, without effect on a decode step's result: the
# window is in the mask already.
_WITHOUT_EFFECT = (
    "dropout",
    "sliding_window",
    "is_causal",
    "output_attentions",
    "use_cache",
    "position_ids",
    "cache_position",
)


class _Handover:
    """What a layer's cache hands to the attention function that runs right after it: its faces and the position."""

    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


HANDOVER = _Handover()


def register() -> None:
    """Adds the attention function to transformers' registries. Twice is harmless.

    Raises:
        AttributeError: this transformers has no such registries.
    """
    attention, masks, boolean_mask = probes.attention_registries()
    attention.register(NAME, attention_forward)
    masks.register(NAME, boolean_mask)


@contextlib.contextmanager
def chosen(config: Any) -> Iterator[None]:
    """Names this attention function in a model's configuration, for the length of a step.

    Around the compiled step, not inside it: torch 2.11 traces the assignment and then reads the old value.

    Args:
        config: of the decoder.

    Source: ``PreTrainedConfig._attn_implementation`` is a property over ``_attn_implementation_internal``; its setter
    would also write to the configurations of other parts of the model.
    """
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def named(config: Any) -> Any:
    """The attention that a configuration names."""
    return getattr(config, "_attn_implementation_internal", None)


def name_again(config: Any, before: Any) -> None:
    """Undoes `chosen` where it could not do so itself.

    Args:
        config: of the decoder.
        before: what `named` said.
    """
    if named(config) == NAME:
        config._attn_implementation_internal = before
    HANDOVER.stored = None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function for a decode step.

    Args:
        module: the attention module, unused.
        query: `[rows, heads, 1, dim]`.
        key: `[rows, kv_heads, 1, dim]`, the new token's.
        value: `[rows, kv_heads, 1, value_dim]`, the new token's.
        attention_mask: bool `[rows, 1, 1, window]`, True where to attend.
        scaling: factor of the scores; by default one over the root of `dim`.
        softcap: bound of the scores, or None.
        **kwargs: whatever else the model passes.

    Returns:
        `[rows, 1, heads, value_dim]`, and None for weights.

    Raises:
        ValueError: the model passes something that would change the result and is not known here.
    """
    for name, given in kwargs.items():
        if given is not None and name not in _WITHOUT_EFFECT:
            raise ValueError(f"attention argument {name} is not known to hepatch's decode attention")
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise ValueError("hepatch's decode attention needs the model's boolean mask")
    stored = HANDOVER.stored
    HANDOVER.stored = None
    if stored is None:
        raise ValueError("the layer attends without having stored a key and a value")
    keys, values, position = stored
    output = decode_attention(
        query,
        key,
        value,
        keys,
        values,
        attention_mask,
        position,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        0.0 if softcap is None else softcap,
    )
    return output, None


@torch.library.custom_op("hepatch::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Stores one token's key and value in `[window, rows, kv_heads, dim]` and attends over the window.

    Args:
        query: `[rows, heads, 1, dim]`.
        key: `[rows, kv_heads, 1, dim]`.
        value: `[rows, kv_heads, 1, value_dim]`.
        keys: written at `position`.
        values: written at `position`.
        mask: bool `[rows, 1, 1, window]`.
        position: int64 `[1]`.
        scale: factor of the scores.
        softcap: bound of the scores, 0 for none.

    Returns:
        `[rows, 1, heads, value_dim]` in the query's dtype, contiguous.
    """
    if query.is_cuda and probes.has_triton():
        from hepatch.backends.attention_kernel import attend

        return attend(query, key, value, keys, values, mask, position, scale, softcap)
    return attend_with_torch(query, key, value, keys, values, mask, position, scale, softcap)


@decode_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def attend_with_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """`decode_attention` in torch's own operations: on a CPU, and what the kernel is tested against."""
    rows, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    keys.index_copy_(0, position, key.permute(2, 0, 1, 3).to(keys.dtype))
    values.index_copy_(0, position, value.permute(2, 0, 1, 3).to(values.dtype))
    # A single query: the heads that share a KV head become its queries, so that keys and values are not repeated.
    packed = query.reshape(rows, kv_heads, heads // kv_heads, dim).to(keys.dtype)
    all_keys, all_values = keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)
    if softcap:
        scores = (packed @ all_keys.transpose(2, 3)).float() * scale
        scores = (scores / softcap).tanh() * softcap
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        output = weights.to(values.dtype) @ all_values
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            packed, all_keys, all_values, attn_mask=mask, scale=scale
        )
    return output.reshape(rows, 1, heads, value.shape[3]).to(query.dtype)
