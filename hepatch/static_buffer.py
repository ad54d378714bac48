"""Memory at one address that a compiled step reads and writes through contiguous faces of different sizes.

A step of a region must find every buffer that it mutates at a static address, and a mutated *view* of a larger buffer
does not count: Inductor would skip CUDA graphs. So a buffer here is flat, and a *face* is a tensor of its own over the
front of that memory, of exactly the sizes that a key asks for. Faces of different sizes share the address; a step sees
one face of a buffer at a time.

Two sizes in a graph, rows and window, are symbolic. As every face is contiguous and as large as its key, nothing in the
graph slices, no third size comes in, and tracing and compiling cost a third of what they cost with slices of larger
buffers.
"""

from __future__ import annotations

import math

import torch

# A face takes one or two KiB of the host's memory, and a run of many batch sizes and lengths asks for ever new ones.
MOST_FACES = 2048


class StaticBuffer:
    """A flat buffer and its faces.

    Args:
        dtype: of the elements.
        device: where the memory is.
        unique: no address comes back, because memory that is given up is kept. For a buffer by whose address graphs
            tell that they are out of date; growing counts as well as `relocate`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, unique: bool = False) -> None:
        self._unique = unique
        self._flat = torch.zeros(0, dtype=dtype, device=device)
        self._faces: dict[tuple[int, ...], torch.Tensor] = {}
        self._retired: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return int(self._flat.nbytes)

    @property
    def address(self) -> int:
        """Where the memory is, 0 while there is none."""
        return self._flat.data_ptr()

    def reserve(self, elements: int) -> None:
        """Makes room. Memory that is too small is given up first, with what it held; the address changes then."""
        if elements <= self._flat.numel():
            return
        self._give_up()
        self._flat = self._flat.new_zeros(0)
        self._flat = self._flat.new_zeros(elements)

    def relocate(self) -> None:
        """Moves to another address, with what is held."""
        self._give_up()
        # The old memory is alive until the copy is made, so the addresses differ.
        self._flat = self._flat.clone()

    def _give_up(self) -> None:
        self._faces.clear()
        if self._unique:
            # A graph that was recorded for an earlier address must not find itself at home again.
            self._retired.append(self._flat)

    def face(self, *shape: int, dynamic: tuple[int, ...]) -> torch.Tensor:
        """The front of the memory as a contiguous tensor; one object for each shape, until the address changes.

        Past `MOST_FACES` all are made again when they are asked for; whoever has one keeps it.

        Args:
            shape: sizes of the face; their product is within what was reserved.
            dynamic: dimensions whose size is symbolic in a graph.

        Raises:
            ValueError: the memory is too small.

        Source: ``torch._dynamo.mark_static_address`` (torch 2.6 to 2.13): with ``guard=False`` a new address makes CUDA
        graph trees record again; with a guard it would compile again.
        """
        known = self._faces.get(shape)
        if known is not None:
            return known
        if math.prod(shape) > self._flat.numel():
            raise ValueError(
                f"a face of {list(shape)} does not fit into {self._flat.numel()} elements; reserve() comes first"
            )
        if len(self._faces) >= MOST_FACES:
            self._faces.clear()
        # set_, not a view: a view is recognised as one and not as static. An empty stride means contiguous.
        face = self._flat.new_empty(0).set_(self._flat.untyped_storage(), 0, shape, ())
        torch._dynamo.mark_static_address(face, guard=False)
        for dimension in dynamic:
            # A size of one is compiled apart, whatever a mark says.
            if shape[dimension] != 1:
                torch._dynamo.mark_dynamic(face, dimension)
        self._faces[shape] = face
        return face


def make_static(buffer: torch.Tensor) -> torch.Tensor:
    """Marks a buffer of fixed size as living at one address."""
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer
