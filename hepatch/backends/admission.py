"""Admission of a model to the native backend, by behaviour.

Before anything is compiled, a short left-padded prompt and two decode steps run through `NativeForward` and through the
model's own forward without a cache. A model whose masks or positions depend on something that `NativeForward` does not
hand over shows here, and keeps its own path. Nothing random is drawn and no weight is written.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from hepatch import probes
from hepatch.backends import attention
from hepatch.backends.native import Decoder, NativeForward
from hepatch.backends.static_kv import StaticKV
from hepatch.backends.step import StepView
from hepatch.backends.tolerance import difference
from hepatch.errors import first_line
from hepatch.generate_call import Prompt
from hepatch.report import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT, STEPS, PADDING, WINDOW = 6, 2, 2, 16
# The attention function finds a layer's cache in one place of the process.
_one_at_a_time = threading.Lock()


class NotAdmittedError(Exception):
    """A model's forward over a static cache is not what its plain forward is."""


def admit(model: Any, device: torch.device) -> NativeForward:
    """The quickest forward of a model over a static cache that is right.

    Tried in turn: layers as ops with hepatch's attention, the same with the model's own, and the model traced whole.

    Args:
        model: a causal LM of transformers.
        device: where the weights are.

    Raises:
        NotAdmittedError: none is right; the message names the model and says what was found with the last.
    """
    with _one_at_a_time:
        ways = [{"own_attention": False}, {"own_attention": True}, {"own_attention": True, "layered": False}]
        try:
            attention.register()
        except (AttributeError, ImportError):
            del ways[0]
        for way in ways[:-1]:
            try:
                return _checked(NativeForward(model, **way), device)
            except NotAdmittedError as error:  # noqa: PERF203 - three rounds, and a failed one leads to the next
                logger.debug("hepatch: %s does not decode with %s: %s", type(model).__name__, way, error)
        return _checked(NativeForward(model, **ways[-1]), device)


def _checked(forward: NativeForward, device: torch.device) -> NativeForward:
    name = type(forward.model).__name__
    try:
        with torch.inference_mode(False), torch.no_grad():
            worst = max(_differences(forward, device))
    except Exception as error:
        raise NotAdmittedError(
            f"{name} does not decode over a static cache ({type(error).__name__}: {first_line(error)})"
        ) from error
    if worst > 1.0:
        raise NotAdmittedError(
            f"{name} over a static cache differs from itself without one, by {worst:.1f} times what rounding explains"
        )
    return forward


def _differences(forward: NativeForward, device: torch.device) -> Iterator[float]:
    """For the prompt and each step: largest difference of logits, in units of the tolerance."""
    model = forward.model
    total = PROMPT + STEPS
    ids = (torch.arange(2 * total, device=device).view(2, total) * 7 + 3) % min(probes.vocabulary(model), 997)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kv = StaticKV(probes.layer_count(model))
    kv.reserve(2 * WINDOW)
    kv.turn(2, WINDOW)
    logits = forward.prefill(kv, Prompt(ids[:, :PROMPT], mask[:, :PROMPT], positions[:, :PROMPT]))
    yield difference(logits, _reference(forward, ids, mask, positions, PROMPT))
    open_mask = torch.ones(2, WINDOW, dtype=torch.long, device=device)
    open_mask[:, :total] = mask
    view = StepView(torch.tensor([PROMPT], device=device), open_mask.t())
    decoder = Decoder(forward, kv, view)
    decoder.turn()
    for step in range(PROMPT, total):
        view.position.fill_(step)
        with decoder.held():
            logits = decoder.step(ids[:, step : step + 1], open_mask, positions[:, step : step + 1])
        yield difference(logits, _reference(forward, ids, mask, positions, step + 1))


def _reference(
    forward: NativeForward, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    return forward.without_cache(ids[:, :length], mask[:, :length], positions[:, :length])
