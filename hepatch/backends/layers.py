"""Decoder layers as opaque ops: a model of any depth costs the compilation of one layer.

Tracing and compiling a decode step is paid by the operation, and nearly all operations are the same layer again and
again. So the step that is compiled whole sees each decoder layer as ONE op, `hepatch::layer`; the op's body runs the
layer's own forward, compiled by itself, once for all layers of the same shape. When a step is recorded, what the bodies
launch is recorded with it.

Two things follow, and both are dealt with here and in `region`:

* What a layer does is hidden from the guards of the step. Dynamo still guards the layers' own compilation, but a replay
  runs no host code. `LayerStack.signature` has those guards evaluated, once a generate, without launching anything; a
  region records anew when the answer changes (an adapter was switched, merged, added).
* Weights and KV cache are hidden from CUDA graph trees, which would record anew when an address changes. The region is
  told by `Attachment` and records anew.

The position is an argument of the op although the body could find it: the step moves it on, and must not do so before.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from hepatch import probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# cuDNN's attention, which torch prefers for a masked step, differs from run to run; these two do not.
EXACT_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_handles = itertools.count()
_stacks: weakref.WeakValueDictionary[int, LayerStack] = weakref.WeakValueDictionary()


class NotLayeredError(Exception):
    """The model's layers cannot be run as opaque ops; the message says why."""


class _Hole:
    """Where a tensor stood among a layer's arguments."""

    def __init__(self, name: str) -> None:
        self.name = name


class _CacheHole:
    """Where the KV cache stood among a layer's arguments."""


class LayerCache(Cache):  # type: ignore[misc]
    """The KV cache as one layer sees it: whatever index the layer asks for, it is this layer's.

    The index is not looked at, so that Dynamo does not guard it and one compilation serves all layers.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layers=[])
        self.layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores one token; see `DecodeLayer.update`."""
        updated: tuple[torch.Tensor, torch.Tensor] = self.layer.update(key_states, value_states)
        return updated

    def get_seq_length(self, *args: Any) -> Any:
        """Tokens before this step."""
        return self.layer.get_seq_length()


class LayerCalls:
    """How a model calls its layers.

    Attributes:
        templates: by layer, positional and named arguments with holes where tensors and cache stood.
        returns: by layer, what it returns behind the hidden states; layers that return a bare tensor are absent.
    """

    def __init__(self) -> None:
        self.templates: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.returns: dict[int, tuple[Any, ...]] = {}


class _Runs:
    """What the compiled layers of a stack and the stack tell each other.

    Apart from the stack, because Dynamo keeps every backend that it was ever given until it is reset: one that reached
    the stack would keep weights and KV cache alive for good.

    Attributes:
        ran: a layer has run.
        probing: what stands for a layer's output while only guards are evaluated; None at other times.
        found: what a recording would bake in, of each layer that was probed.
    """

    def __init__(self) -> None:
        self.ran = False
        self.probing: torch.Tensor | None = None
        self.found: list[tuple[Any, ...]] = []


class LayerStack:
    """The decoder layers of a model, callable as ops.

    Args:
        model: a causal LM of transformers.
        cache_layers: the KV cache of each layer, in order.
        view: where the layers of `cache_layers` read the position.
        state: where the step keeps its own position.
        calls: how the model calls its layers; filled by a first step that runs eagerly.

    Raises:
        NotLayeredError: the layers are not found, or something else stands in for a layer's forward.
    """

    def __init__(self, model: Any, cache_layers: Sequence[Any], view: Any, state: Any, calls: LayerCalls) -> None:
        self._layers = probes.decoder_layers(model)
        if len(self._layers) != len(cache_layers):
            raise NotLayeredError(f"{len(self._layers)} decoder layers were found for {len(cache_layers)} of KV cache")
        if any("forward" in layer.__dict__ for layer in self._layers):
            raise NotLayeredError("a decoder layer has a forward of its own on the instance")
        self._view = view
        self._caches = [LayerCache(layer) for layer in cache_layers]
        self._model_calls = calls
        self._inputs: list[tuple[_Input, ...]] = [()] * len(self._layers)
        self._samples: dict[tuple[_Input, ...], list[torch.Tensor]] = {}
        self._probes: dict[int, _Probe] = {}
        self._run: Callable[..., Any] = run_layer
        self._exact = False
        self._runs = _Runs()
        self.handle = next(_handles)
        _stacks[self.handle] = self
        self._calls = [types.MethodType(_caller(self, state, index), layer) for index, layer in enumerate(self._layers)]

    @contextlib.contextmanager
    def opaque(self) -> Iterator[None]:
        """While this is held, the model's layers are ops. To be held around every step, traced or compiled."""
        # Not setattr: it would look the name up among parameters and modules first, at every step.
        try:
            for layer, call in zip(self._layers, self._calls, strict=True):
                layer.__dict__["forward"] = call
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """The model's layers are its own."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def turn(self) -> None:
        """Takes the faces of the KV cache that are current."""
        for cache in self._caches:
            cache.layer.turn()

    def learn(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of how the model calls a layer; `run` fills tensors into the same places."""
        self._model_calls.templates[index] = (
            tuple(_template(str(place), value) for place, value in enumerate(args)),
            {name: _template(name, value) for name, value in kwargs.items()},
        )

    def returned(self, index: int, output: torch.Tensor) -> Any:
        """A layer's output in the form that the model expects."""
        rest = self._model_calls.returns.get(index)
        return output if rest is None else (output, *rest)

    def compile(self, backend: str, exact: bool) -> None:
        """Has the layers compiled from their next run on.

        Args:
            backend: a `torch.compile` backend; the layers have no graphs of their own.
            exact: only attention kernels that give the same result in every run.
        """
        self._exact = exact
        compiler = torch._dynamo.lookup_backend(backend)
        serial, runs = itertools.count(), self._runs

        def tagged(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
            if len(outputs) != 1:
                raise NotLayeredError("a decoder layer returns or keeps more than one tensor")
            compiled = compiler(graph, inputs)
            tag = next(serial)

            def run(*values: Any) -> Any:
                if runs.probing is None:
                    runs.ran = True
                    return compiled(*values)
                # Only the guards were wanted, and what a recording would bake in; any tensor will do for an output.
                runs.found.append((tag, *(_frozen(value) for value in values)))
                return (runs.probing,)

            return run

        # A code object of its own: Dynamo's cache and its recompile limit belong to the code object.
        code = run_layer.__code__.replace(co_name=f"decode_layer_{self.handle}")
        self._run = torch.compile(
            types.FunctionType(code, run_layer.__globals__, code.co_name), fullgraph=True, backend=tagged
        )

    def run(
        self, index: int, hidden: torch.Tensor, others: Sequence[torch.Tensor], position: torch.Tensor
    ) -> torch.Tensor:
        """The body of the op: one layer, with its arguments put together again.

        Args:
            index: which layer.
            hidden: `[rows, 1, hidden]`.
            others: the tensors among the layer's other arguments, in order.
            position: int64 `[1]`.

        Returns:
            `[rows, 1, hidden]`.

        Raises:
            NotLayeredError: the layer returns something that an op cannot.
        """
        self._view.position = position
        tensors = (hidden, *others)
        self._inputs[index] = tuple(_Input(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
        output = self._run(*self._arguments(index, tensors))
        if isinstance(output, torch.Tensor):
            return output
        first, *rest = output
        if not isinstance(first, torch.Tensor) or any(isinstance(value, torch.Tensor) for value in rest):
            raise NotLayeredError("a decoder layer returns more than one tensor")
        self._model_calls.returns[index] = tuple(rest)
        return first

    def signature(self) -> int:
        """What a recording bakes in of the layers: which compilation each runs, where its memory is, and its numbers.

        Dynamo's guards are evaluated and nothing is launched. The faces of the KV cache must be those of the last
        `run`, and the cache's layers turned to them.
        """
        self._runs.found.clear()
        # Guards see the dispatcher's state, so it has to be what it is in the body of an op.
        with probes.below_autograd():
            for index, inputs in enumerate(self._inputs):
                known = self._probes.get(index)
                if known is None or known.inputs != inputs:
                    known = self._probes[index] = self._probe(index, inputs)
                self._runs.probing = known.output
                try:
                    self._run(*known.call)
                finally:
                    self._runs.probing = None
        return hash(tuple(self._runs.found))

    def take_ran(self) -> bool:
        """Whether a layer has run from the host since this was last asked; a replay runs none."""
        ran, self._runs.ran = self._runs.ran, False
        return ran

    def _probe(self, index: int, inputs: tuple[_Input, ...]) -> _Probe:
        samples = self._samples.get(inputs)
        if samples is None:
            samples = self._samples[inputs] = [each.empty() for each in inputs]
        return _Probe(inputs, self._arguments(index, samples), samples[0])

    def _arguments(self, index: int, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What `run_layer` takes, for one layer."""
        args, kwargs = self._model_calls.templates[index]
        holes, cache, layer = iter(tensors), self._caches[index], self._layers[index]
        return (
            self._exact,
            type(layer).forward,
            layer,
            tuple(_filled(value, holes, cache) for value in args),
            {name: _filled(value, holes, cache) for name, value in kwargs.items()},
        )


def _frozen(value: Any) -> Any:
    """What a recording keeps of an input to a layer's graph: where a tensor is, or what a number is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.ndim == 0 and value.device.type == "cpu" else value.data_ptr()


class _Input(NamedTuple):
    """A tensor among a layer's arguments, without its memory, which may belong to a graph."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A tensor that Dynamo's guards cannot tell from the original."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class _Probe(NamedTuple):
    """One layer's call for its guards alone: the inputs it imitates, the arguments, and what stands for the output."""

    inputs: tuple[_Input, ...]
    call: tuple[Any, ...]
    output: torch.Tensor


def run_layer(
    exact: bool, forward: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A layer's own forward; compiled, one code object serves all layers."""
    if exact:
        # Inside, so that it is part of what is compiled: a context around the call does not reach a cached graph.
        with sdpa_kernel(EXACT_ATTENTION):
            return forward(layer, *args, **kwargs)
    return forward(layer, *args, **kwargs)


def _caller(stack: LayerStack, state: Any, index: int) -> Callable[..., Any]:
    """What stands in for a layer's forward. Traceable."""

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            stack.learn(index, args, kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        output = torch.ops.hepatch.layer(tensors[0], tensors[1:], state.position, stack.handle, index)
        return stack.returned(index, output)

    return forward


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_tensors(value))
    return found


def _template(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Hole(name)
    if isinstance(value, Cache):
        return _CacheHole()
    if isinstance(value, (tuple, list)):
        return type(value)(_template(name, each) for each in value)
    return value


def _filled(template: Any, holes: Iterator[torch.Tensor], cache: LayerCache) -> Any:
    if isinstance(template, _Hole):
        return mark_symbolic(next(holes), template.name)
    if isinstance(template, _CacheHole):
        return cache
    if isinstance(template, (tuple, list)):
        return type(template)(_filled(each, holes, cache) for each in template)
    return template


def mark_symbolic(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A layer's argument with the sizes marked that depend on the key: rows come first, the window last in a mask."""
    # A tensor object of its own: a mark on what the step passed would be seen by the step's guards.
    tensor = tensor.detach()
    if tensor.shape[0] > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if tensor.ndim > 1 and (tensor.dtype == torch.bool or "mask" in name or "alibi" in name):
        torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1)
    return tensor


@torch.library.custom_op("hepatch::layer", mutates_args=())
def layer_op(
    hidden: torch.Tensor, others: list[torch.Tensor], position: torch.Tensor, handle: int, index: int
) -> torch.Tensor:
    """Runs a decoder layer of the stack `handle`. What it writes, its KV cache, no other operation touches."""
    return _stacks[handle].run(index, hidden, others, position)


@layer_op.register_fake
def _(
    hidden: torch.Tensor, others: list[torch.Tensor], position: torch.Tensor, handle: int, index: int
) -> torch.Tensor:
    return torch.empty_like(hidden)
