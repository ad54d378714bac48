"""How far two computations of the same logits may lie apart, for admission."""

from __future__ import annotations

import torch

# Largest difference allowed, relative to the largest logit: rounding of two orders of summation, not a wrong mask,
# which is off by far more. By dtype of the logits.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits of one shape, in units of what rounding explains: above 1 they differ."""
    allowed = TOLERANCE.get(expected.dtype, TOLERANCE[torch.bfloat16])
    scale = expected.float().abs().max().clamp_min(1.0)
    largest = (found.float() - expected.float()).abs().max() / (scale * allowed)
    # A comparison with NaN is never true: NaN must not pass.
    return float(torch.nan_to_num(largest, nan=float("inf")))
