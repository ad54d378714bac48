"""The least time of a decode step: what it must read, over the rate at which this device copies."""

from __future__ import annotations

from typing import Any

from hepatch.bench.workload import Workload


def weight_bytes(model: Any) -> int:
    """Bytes of weights that one step reads: all but lookup tables, of which it reads a row.

    A table that is also the output projection is read whole.
    """
    import torch

    head = model.get_output_embeddings()
    tied = None if head is None else head.weight
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.weight is not tied
    }
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if id(parameter) not in tables
    )


def bytes_per_step(workload: Workload, rows: int, columns: int, *, weights: int, kv_token: int) -> float:
    """Bytes that a step reads on average over a call: the weights once, and every live position of the KV cache.

    Args:
        workload: decides the prompts.
        rows: of the batch.
        columns: new tokens of the call.
        weights: from `weight_bytes`.
        kv_token: bytes that a token of one row takes in the KV cache.
    """
    prompts = sum(workload.prompt_lengths(rows))
    return weights + kv_token * (prompts + rows * columns / 2)
