"""The decode attention as Triton kernels: one query a head, split over the window where heads do not fill a GPU.

A program serves one row, one KV head and all query heads that share it, and one part of the window. It reads no further
than the position. The new token's key and value come from registers; the program whose part holds the position stores
them. Partial results are joined by a second kernel in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64
_STAGES = 3
_WARPS = 4
_PROGRAMS_PER_PROCESSOR = 2


def attend(
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
    """`hepatch::decode_attention` on a GPU; arguments and result as there."""
    rows, heads, _, dim = query.shape
    kv_heads, value_dim, window = key.shape[1], value.shape[3], keys.shape[0]
    group = heads // kv_heads
    # Tensor cores want 16 queries at the least; what they do in vain is hidden behind the loads.
    padded_group = max(16, triton.next_power_of_2(group))
    splits, part = _split(rows * kv_heads, window, query.device)
    output = torch.empty(rows, 1, heads, value_dim, dtype=query.dtype, device=query.device)
    partial = output
    best = total = output
    if splits > 1:
        partial = torch.empty(splits, rows, heads, value_dim, dtype=torch.float32, device=query.device)
        best = torch.empty(splits, rows, heads, dtype=torch.float32, device=query.device)
        total = torch.empty_like(best)
    flat_mask = mask[:, 0, 0]
    _attend[(rows * kv_heads, splits)](
        query,
        key,
        value,
        keys,
        values,
        flat_mask,
        position,
        partial,
        best,
        total,
        window,
        part,
        scale,
        softcap,
        rows,
        query.stride(0),
        query.stride(1),
        query.stride(3),
        key.stride(0),
        key.stride(1),
        key.stride(3),
        value.stride(0),
        value.stride(1),
        value.stride(3),
        flat_mask.stride(0),
        flat_mask.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED_GROUP=padded_group,
        DIM=dim,
        PADDED_DIM=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
        SPLITS=splits,
        SOFTCAP=bool(softcap),
        BLOCK=_BLOCK,
        STAGES=_STAGES,
        num_warps=_WARPS,
    )
    if splits > 1:
        _join[(rows * heads,)](
            partial,
            best,
            total,
            output,
            rows * heads,
            SPLITS=splits,
            PADDED_SPLITS=triton.next_power_of_2(splits),
            VALUE_DIM=value_dim,
            PADDED_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
            num_warps=1,
        )
    return output


def _split(programs: int, window: int, device: torch.device) -> tuple[int, int]:
    """How many parts the window falls into, and positions a part: enough programs to keep each multiprocessor busy."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    blocks = triton.cdiv(window, _BLOCK)
    splits = max(1, min(blocks, _PROGRAMS_PER_PROCESSOR * processors // programs))
    part = triton.cdiv(blocks, splits) * _BLOCK
    return triton.cdiv(window, part), part


@triton.jit
def _capped(scores, softcap):  # type: ignore[no-untyped-def]
    # The hyperbolic tangent by the logistic function.
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    mask,
    position_pointer,
    partial,
    best_pointer,
    total_pointer,
    window,
    part,
    scale,
    softcap,
    rows,
    query_row,
    query_head,
    query_dim,
    key_row,
    key_head,
    key_dim,
    value_row,
    value_head,
    value_dim,
    mask_row,
    mask_column,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    split = tl.program_id(1)
    row = (program // KV_HEADS).to(tl.int64)
    head = program % KV_HEADS
    position = tl.load(position_pointer)
    queries = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)
    in_dim = dims < DIM
    in_value_dim = value_dims < VALUE_DIM
    in_group = queries < GROUP

    q = tl.load(
        query + row * query_row + (head * GROUP + queries[:, None]) * query_head + dims[None, :] * query_dim,
        mask=in_group[:, None] & in_dim[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    new_key = tl.load(key + row * key_row + head * key_head + dims * key_dim, mask=in_dim, other=0.0)
    new_value = tl.load(
        value + row * value_row + head * value_head + value_dims * value_dim, mask=in_value_dim, other=0.0
    )
    new_key = new_key.to(keys.dtype.element_ty)
    new_value = new_value.to(values.dtype.element_ty)

    # Faces are contiguous [window, rows, kv_heads, dim].
    key_base = keys + (row * KV_HEADS + head) * DIM
    value_base = values + (row * KV_HEADS + head) * VALUE_DIM
    key_position = rows.to(tl.int64) * KV_HEADS * DIM
    value_position = rows.to(tl.int64) * KV_HEADS * VALUE_DIM
    start = split * part
    stop = tl.minimum(start + part, window)
    if (position >= start) & (position < stop):
        tl.store(key_base + position * key_position + dims, new_key, mask=in_dim)
        tl.store(value_base + position * value_position + value_dims, new_value, mask=in_value_dim)

    # Stored columns only: the loads feed the products as they are, so that they can be fetched ahead. What lies behind
    # the position is closed in the mask by causality, and the new token is added behind the loop.
    stored = tl.minimum(stop, position)
    best = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    sums = tl.zeros((PADDED_GROUP, PADDED_VALUE_DIM), tl.float32)
    for block in tl.range(start, stored, BLOCK, num_stages=STAGES):
        columns = block + tl.arange(0, BLOCK)
        inside = columns < stored
        places = columns.to(tl.int64)
        k = tl.load(
            key_base + places[:, None] * key_position + dims[None, :],
            mask=inside[:, None] & in_dim[None, :],
            other=0.0,
        )
        v = tl.load(
            value_base + places[:, None] * value_position + value_dims[None, :],
            mask=inside[:, None] & in_value_dim[None, :],
            other=0.0,
        )
        is_open = tl.load(mask + row * mask_row + places * mask_column, mask=inside, other=0) != 0
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = _capped(scores, softcap)
        scores = tl.where(is_open[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Without an open column the maximum stays at minus infinity; its difference with itself would be NaN.
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp(best - reference)
        weights = tl.exp(scores - reference[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best

    if (position >= start) & (position < stop):
        scores = tl.sum(q.to(tl.float32) * new_key[None, :].to(tl.float32), axis=1) * scale
        if SOFTCAP:
            scores = _capped(scores, softcap)
        new_best = tl.maximum(best, scores)
        shrink = tl.exp(best - new_best)
        weight = tl.exp(scores - new_best)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * new_value[None, :].to(tl.float32)
        best = new_best

    heads = (row * KV_HEADS + head) * GROUP + queries
    in_output = in_group[:, None] & in_value_dim[None, :]
    if SPLITS == 1:
        result = sums / total[:, None]
        tl.store(
            partial + heads[:, None] * VALUE_DIM + value_dims[None, :],
            result.to(partial.dtype.element_ty),
            mask=in_output,
        )
    else:
        offset = split * rows.to(tl.int64) * KV_HEADS * GROUP + heads
        tl.store(partial + offset[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=in_output)
        tl.store(best_pointer + offset, best, mask=in_group)
        tl.store(total_pointer + offset, total, mask=in_group)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    partial,
    best_pointer,
    total_pointer,
    output,
    count,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)
    in_splits = splits < SPLITS
    in_value_dim = value_dims < VALUE_DIM
    offsets = splits.to(tl.int64) * count + head
    best = tl.load(best_pointer + offsets, mask=in_splits, other=float("-inf"))
    total = tl.load(total_pointer + offsets, mask=in_splits, other=0.0)
    factor = tl.exp(best - tl.max(best, axis=0))
    sums = tl.load(
        partial + offsets[:, None] * VALUE_DIM + value_dims[None, :],
        mask=in_splits[:, None] & in_value_dim[None, :],
        other=0.0,
    )
    result = tl.sum(sums * factor[:, None], axis=0) / tl.sum(total * factor, axis=0)
    tl.store(output + head * VALUE_DIM + value_dims, result.to(output.dtype.element_ty), mask=in_value_dim)
