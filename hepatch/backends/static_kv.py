"""The KV cache that regions write: one pair of preallocated buffers a layer, kept from call to call.

Invariants, each with a test:

* A buffer is passed to the compiled step whole and has a static address; what a step reads of it is a slice made inside.
  A mutated *view* would make Inductor skip graphs, and writing through a slice copies the whole cache each step.
* Capacity is a little larger than the largest key: a slice that may be the whole buffer adds a guard and recompiles.
* Rows and length are marked dynamic from the first compilation and the address carries no guard, so that growth records
  anew and compiles nothing.
* The four symbolic sizes (live rows, window, allocated rows, allocated length) must differ in the first compilation:
  Dynamo gives equal sizes one symbol and would recompile when they part (Source: ``torch.fx.experimental.symbolic_shapes``,
  duck shaping). `SPARE_ROWS` and `SPARE_LENGTH` make allocated rows odd, allocated length no multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH_STEP = 256
SPARE_ROWS = 3
SPARE_LENGTH = 8


@dataclass(frozen=True)
class Capacity:
    """How many rows and positions a cache serves.

    Args:
        rows: live rows, a power of two of at least 2.
        length: positions, a multiple of `LENGTH_STEP`.
    """

    rows: int
    length: int

    @property
    def allocated(self) -> tuple[int, int]:
        """Rows and positions of the buffers themselves."""
        return self.rows + SPARE_ROWS, self.length + SPARE_LENGTH

    def holds(self, rows: int, length: int) -> bool:
        """Whether a call of `rows` rows and `length` positions fits."""
        return rows <= self.rows and length <= self.length


def grown(current: Capacity | None, rows: int, length: int, longest: int | None) -> Capacity:
    """The capacity that serves a call, by the growth policy.

    The first call decides the start; afterwards a dimension that is too small grows by at least half, so that slowly
    rising lengths do not record anew at each call.

    Args:
        current: the present capacity, or None before the first call.
        rows: rows of the call.
        length: prompt and new tokens of the call.
        longest: the model's number of positions, or None where it has no limit. Growth by half stops there.
    """
    wanted_rows, wanted_length = rows, length
    if current is not None:
        wanted_rows = rows if rows > current.rows else current.rows
        wanted_length = max(length, current.length * 3 // 2) if length > current.length else current.length
        if longest is not None:
            wanted_length = max(length, min(wanted_length, longest))
    return Capacity(
        rows=max(2, 1 << (wanted_rows - 1).bit_length()),
        length=-(-wanted_length // LENGTH_STEP) * LENGTH_STEP,
    )


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token: `heads` vectors of `key_dim` and of `value_dim` numbers of `dtype`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class StaticKV:
    """Keys `[rows, heads, length, key_dim]` and values `[rows, heads, length, value_dim]` of every layer.

    Layers are allocated when the first prompt reaches them, because only then heads, sizes and dtype are certain
    (autocast decides the dtype of keys and values, not the weights).
    """

    def __init__(self, layers: int) -> None:
        self.capacity: Capacity | None = None
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self._shapes: list[LayerShape | None] = [None] * layers

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers hold on the device."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def reserve(self, capacity: Capacity) -> None:
        """Takes on a capacity; layers that exist are allocated anew and lose what they held."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for index, shape in enumerate(self._shapes):
            self.keys[index] = self.values[index] = None
            if shape is not None:
                self._allocate(index, shape)

    def write_prompt(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a prompt at positions 0 and up.

        Args:
            index: the layer.
            keys: `[batch, heads, prompt, key_dim]`.
            values: `[batch, heads, prompt, value_dim]`.

        Raises:
            RuntimeError: the layer holds another shape, dtype or device than the prompt brings.
        """
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
        known = self._shapes[index]
        if known is None:
            self._shapes[index] = shape
            self._allocate(index, shape)
        elif known != shape:
            raise RuntimeError(f"the static KV cache of layer {index} holds {known}, but the prompt brings {shape}")
        batch, prompt = keys.shape[0], keys.shape[2]
        stored_keys, stored_values = self.keys[index], self.values[index]
        assert stored_keys is not None
        assert stored_values is not None
        stored_keys[:batch, :, :prompt].copy_(keys)
        stored_values[:batch, :, :prompt].copy_(values)

    def _allocate(self, index: int, shape: LayerShape) -> None:
        assert self.capacity is not None, "reserve() comes before the first prompt"
        rows, length = self.capacity.allocated
        for store, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
            # Zeros, not empty: positions behind the mask are multiplied by a weight of exactly zero, and zero times
            # whatever NaN the memory held before would be NaN.
            buffer = torch.zeros(rows, shape.heads, length, dim, dtype=shape.dtype, device=shape.device)
            make_static(buffer, dynamic=(0, 2))
            store[index] = buffer

    def _buffers(self) -> Iterator[torch.Tensor]:
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                yield buffer


def make_static(buffer: torch.Tensor, dynamic: tuple[int, ...] = ()) -> torch.Tensor:
    """Marks a buffer as living at one address, without a guard on it, and some of its sizes as symbolic.

    Source: ``torch._dynamo.mark_static_address`` (torch 2.6 to 2.13): with ``guard=False`` a new address makes CUDA graph
    trees record again; with a guard it would compile again.
    """
    torch._dynamo.mark_static_address(buffer, guard=False)
    for dimension in dynamic:
        torch._dynamo.mark_dynamic(buffer, dimension)
    return buffer
