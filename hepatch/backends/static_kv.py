"""The KV cache that regions work on: flat memory for keys and values of every layer, kept from call to call.

Positions come first: a face is `[window, rows, heads, dim]`. The faces for all windows of a call are then the front of
the same memory, whatever the window, so that a longer window moves nothing and a step writes one contiguous stretch.
How many rows and positions fit is one number, their product: a call of many short rows and one of few long rows share
the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hepatch.static_buffer import StaticBuffer

_ROWS_AND_WINDOW = (0, 1)


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token: `heads` vectors of `key_dim` and of `value_dim` numbers of `dtype`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class _Layer(NamedTuple):
    shape: LayerShape
    keys: StaticBuffer
    values: StaticBuffer


def grown(tokens: int, wanted: int) -> int:
    """Capacity, in tokens (rows times positions), for a call that wants `wanted` while there is room for `tokens`.

    Memory that is too small grows by at least half, so that slowly rising lengths do not record anew at each call.
    """
    return tokens if wanted <= tokens else max(wanted, tokens * 3 // 2)


class StaticKV:
    """Keys and values of every layer, each `[window, rows, heads, dim]` in the face that is current.

    Layers are allocated when the first prompt reaches them, because only then heads, sizes and dtype are certain
    (autocast decides the dtype of keys and values, not the weights).

    Args:
        layers: how many the model has.

    Attributes:
        tokens: capacity, rows times positions.
        generation: changes when memory moves.
        keys, values: the current face of each layer; None for a layer that no prompt has reached.
        padding: bool `[prompt, batch, 1, 1]`, True where the prompt at hand is padded; None where nothing is.
    """

    def __init__(self, layers: int) -> None:
        self.tokens = 0
        self.generation = 0
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.padding: torch.Tensor | None = None
        self._layers: list[_Layer | None] = [None] * layers
        self._rows = self._window = 0

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers if layer is not None)

    def reserve(self, tokens: int) -> None:
        """Makes room for rows times positions; what was held is given up when the memory has to grow."""
        if tokens <= self.tokens:
            return
        self.tokens = grown(self.tokens, tokens)
        self._rows = self._window = 0
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)
        for layer in self._layers:
            if layer is not None:
                self._reserve_layer(layer)

    def turn(self, rows: int, window: int) -> None:
        """Makes the face for `rows` rows and `window` positions current. Changing the window keeps what is stored."""
        if (rows, window) == (self._rows, self._window):
            return
        # Current only when every layer is: an interrupt in between must not leave a half-turned cache that looks done.
        self._rows = self._window = 0
        for index, layer in enumerate(self._layers):
            if layer is not None:
                self._turn_layer(index, layer, rows, window)
        self._rows, self._window = rows, window

    def write_prompt(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a prompt at positions 0 and up, and zeros wherever the current face has anything else.

        Args:
            index: the layer.
            keys: `[batch, heads, prompt, key_dim]`.
            values: `[batch, heads, prompt, value_dim]`.

        Raises:
            RuntimeError: the layer holds another shape, dtype or device than the prompt brings.
        """
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
        layer = self._layers[index]
        if layer is None:
            layer = _Layer(shape, StaticBuffer(shape.dtype, shape.device), StaticBuffer(shape.dtype, shape.device))
            self._layers[index] = layer
            self._reserve_layer(layer)
            self._turn_layer(index, layer, self._rows, self._window)
        elif layer.shape != shape:
            raise RuntimeError(
                f"the static KV cache of layer {index} holds {layer.shape}, but the prompt brings {shape}"
            )
        for face, prompt in ((self.keys[index], keys), (self.values[index], values)):
            assert face is not None
            batch, length = prompt.shape[0], prompt.shape[2]
            face[:length, :batch].copy_(prompt.permute(2, 0, 1, 3))
            # A position that the mask closes has weight zero, and zero times NaN is NaN: whether an earlier call left
            # it there or the model computes it for padding.
            if self.padding is not None:
                face[:length, :batch].masked_fill_(self.padding, 0)
            if batch < face.shape[1]:
                face[:length, batch:].zero_()
            face[length:].zero_()

    def read(self, index: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies `[batch, heads, length, dim]` of a layer's keys and values, or None where it holds none."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            return None
        return (
            keys[:length, :batch].permute(1, 2, 0, 3).contiguous(),
            values[:length, :batch].permute(1, 2, 0, 3).contiguous(),
        )

    def _reserve_layer(self, layer: _Layer) -> None:
        self.generation += 1
        layer.keys.reserve(self.tokens * layer.shape.heads * layer.shape.key_dim)
        layer.values.reserve(self.tokens * layer.shape.heads * layer.shape.value_dim)

    def _turn_layer(self, index: int, layer: _Layer, rows: int, window: int) -> None:
        front = window, rows, layer.shape.heads
        self.keys[index] = layer.keys.face(*front, layer.shape.key_dim, dynamic=_ROWS_AND_WINDOW)
        self.values[index] = layer.values.face(*front, layer.shape.value_dim, dynamic=_ROWS_AND_WINDOW)
