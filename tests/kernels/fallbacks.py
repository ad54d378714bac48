"""DeepSpeed's real inference containers on a CPU: its own torch fallbacks, with their faults put right.

DeepSpeed has a torch fallback for every op of its inference extension, and a Python `InferenceContext` with the counter
that the kernels keep in C++. A container takes the fallbacks when the extension lacks the op, so an empty extension
makes it run here. Some fallbacks compute something else than the kernels do; what is put right below is named one by
one. The containers, their policies, the weights they share with the model and the workspace are DeepSpeed's own
throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class _NoKernels:
    """An inference extension without a single op."""


class _Rotary:
    """Cosines and sines by position; the class of transformers that the fallback names takes other arguments today."""

    def __init__(self, dim: int, base: float, device: Any) -> None:
        self.frequencies = base ** -(torch.arange(0, dim, 2, device=device).float() / dim)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, heads, dim]` turned by int64 `[batch, seq]`."""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, :, None]
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos().to(x.dtype) + swapped * angles.sin().to(x.dtype)


def install() -> None:
    """Let containers be built and run on this machine; before `deepspeed.initialize`. Twice is silent."""
    from deepspeed.ops.transformer.inference.op_binding import base, mlp_gemm, softmax_context, workspace
    from deepspeed.utils.types import ActivationFuncType

    if isinstance(base.BaseOp.inference_module, _NoKernels):
        return
    base.BaseOp.inference_module = _NoKernels()
    activations = {
        ActivationFuncType.ReLU: functional.relu,
        ActivationFuncType.GELU: lambda x: functional.gelu(x, approximate="tanh"),
    }

    def mlp_gemm_fallback(self: Any, input: Any, residual: Any, input_bias: Any, *rest: Any) -> Any:  # noqa: A002
        """The fallback takes GELU whatever the model has."""
        inner, outer, bias, gamma, beta, eps, _pre, after_attention, _s1, _s2, _dtype, activation, transposed = rest
        assert after_attention, "the kernels' layout for a parallel residual has no fallback"
        normed = functional.layer_norm(input + residual + input_bias, (input.shape[2],), gamma, beta, eps)
        hidden = functional.linear(normed, inner if transposed else inner.t(), bias)
        hidden = activations[ActivationFuncType(activation)](hidden)
        return functional.linear(hidden, outer if transposed else outer.t()), normed

    mlp_gemm.MLPGemmOp.mlp_gemm_fallback = mlp_gemm_fallback

    def get_rotary(self: Any, dim: int, base: float, device: Any = None) -> _Rotary:
        if self.rotary is None:
            self.rotary = _Rotary(dim, base, device)
        return self.rotary

    workspace.InferenceContext.get_rotary = get_rotary
    original = softmax_context.SoftmaxContextOp.softmax_context_fallback

    def softmax_context_fallback(
        self: Any, qkv: Any, mask: Any, rotary_dim: int, rotate_half: bool, rotate_two: bool, heads: int, *rest: Any
    ) -> Any:
        """The fallback hands the rotary class an integer for positions; turned here by the rows' positions instead."""
        theta, positions = rest[-4], rest[-1]
        if rotary_dim > 0 and rotate_half:
            batch, length, width = qkv.shape
            parts = qkv.view(batch, length, 3, heads, width // (3 * heads)).unbind(2)
            rotary = workspace.InferenceContext.Instance().get_rotary(rotary_dim, theta, qkv.device)
            turned = [rotary.turn(part, positions) for part in parts[:2]]
            qkv = torch.stack((*turned, parts[2]), 2).reshape(batch, length, width)
        return original(self, qkv, mask, -1, False, rotate_two, heads, *rest)

    softmax_context.SoftmaxContextOp.softmax_context_fallback = softmax_context_fallback
