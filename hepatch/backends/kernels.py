"""The kernels backend: DeepSpeed's inference containers inside a region whose key is the exact position.

Inside a step that is compiled whole, all containers together are ONE opaque op that changes the hidden states in place,
and so is each norm and projection outside the layers: what they launch is, bit for bit, what the eager engine launches.
Embeddings, masks and the choice of the token are traced. Where the sequence stands is state of the host, which a
recording bakes in; `ledger` keeps account of it.

The containers are in force only within a call that a region serves. At any other time a model runs its own layers: a
forward that wants gradients, a log-prob forward between two generates, beam search and copies of the model are
transformers' own, and none of them disturbs a sequence.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hepatch import kernel_probes, probes
from hepatch.backends.step import IdleHooks, last_logits
from hepatch.ledger import PositionLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hepatch.generate_call import Prompt

_handles = itertools.count()
_stacks: weakref.WeakValueDictionary[int, ContainerStack] = weakref.WeakValueDictionary()

# What a layer may be called with beside these is nothing that the op hands on.
_MASK, _POSITIONS = "attention_mask", "position_ids"
# The cache, which the kernels keep themselves, and arguments that only say how to compute what they compute anyway.
_UNUSED = frozenset(
    {"past_key_value", "layer_past", "use_cache", "output_attentions", "cache_position", "position_embeddings"}
)


class NotExpressedError(Exception):
    """The model calls its layers with something that a container's op cannot hand on; the message names it."""


class ContainerStack:
    """The containers of one model in order, and what stands in for the modules outside the layers.

    Args:
        layers: the model's decoder layers.
        containers: DeepSpeed's container of each.
        others: modules outside the layers, each with what stock puts in for it.

    Attributes:
        ledger: where the kernels stand.
        others: as given.
    """

    def __init__(
        self,
        layers: list[torch.nn.Module],
        containers: list[Any],
        others: list[tuple[torch.nn.Module, torch.nn.Module]],
    ) -> None:
        self.layers = layers
        self.containers = containers
        self.in_python = kernel_probes.reads_counter_in_python(containers[0])
        self._counter = kernel_probes.PythonCounter() if self.in_python else kernel_probes.KernelCounter(containers[0])
        self.ledger = PositionLedger(self._counter, len(containers))
        self.modules = [container.module for container in containers]
        self.others = others
        # Embeddings are exact whichever way they are looked up, and the prompt's are stock's.
        opaque = [(own, stock) for own, stock in others if not isinstance(own, torch.nn.Embedding)]
        self._opaque: list[Any] = [stock for _, stock in opaque]
        self._presents: Any = None
        self.handle = next(_handles)
        _stacks[self.handle] = self
        self._step_calls: list[tuple[torch.nn.Module, Callable[..., Any]]] = [
            (layer, types.MethodType(_layer_call(self.handle, index, layer, module), layer))
            for index, (layer, module) in enumerate(zip(layers, self.modules, strict=True))
        ]
        self._step_calls += [
            (own, types.MethodType(_other_call(self.handle, index), own)) for index, (own, _) in enumerate(opaque)
        ]
        self._prompt_calls: list[tuple[torch.nn.Module, Callable[..., Any]]] = [
            (layer, module.forward) for layer, module in zip(layers, self.modules, strict=True)
        ]
        self._prompt_calls += [(own, stock.forward) for own, stock in others]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """The model runs through its containers, as stock's does in eval mode. For prompts."""
        with _standing_in(self._prompt_calls):
            yield

    @contextlib.contextmanager
    def opaque(self) -> Iterator[None]:
        """The same as ops. To be held around every step, traced or compiled."""
        with _standing_in(self._step_calls):
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The model runs its own layers for a while within `in_force`."""
        before = [(module, module.__dict__.pop("forward", None)) for module, _ in self._prompt_calls]
        try:
            yield
        finally:
            for module, forward in before:
                if forward is not None:
                    module.__dict__["forward"] = forward

    def step_aside(self) -> None:
        """The model runs its own layers: takes away what stock's `eval` and `train` have set on them."""
        for module, _ in self._prompt_calls:
            module.__dict__.pop("forward", None)

    def before_prompt(self) -> None:
        """To be called before a prompt: once, runs the kernels on the stream on which the counter is moved."""
        self._counter.warm_up()

    def capacity(self) -> int:
        """Positions that the workspace has; to be asked before a prompt."""
        return self._counter.capacity()

    def prompt_has_run(self, tokens: int) -> None:
        """A prompt of `tokens` columns has run through every container."""
        self.ledger.prompt(tokens)
        self._presents = self.modules[-1].layer_past

    def begin(self, tokens: int, *, replay: bool) -> None:
        """A step over `tokens` tokens is about to run.

        Raises:
            LedgerError: the position is not known.
        """
        if self.modules[-1].layer_past is not self._presents:
            # A streamer's or another thread's forward went through the containers and moved the sequence.
            self.ledger.lose()
        self.ledger.begin(tokens, replay=replay)

    def end(self, *, replay: bool) -> None:
        """The step is over.

        Raises:
            LedgerError: it did not run as predicted.
        """
        self.ledger.end(replay=replay)
        self._presents = self.modules[-1].layer_past

    def run(self, hidden: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """The body of the containers' op: runs all of them and leaves the last one's output in `hidden`.

        Args:
            hidden: `[rows, 1, hidden]`.
            mask: additive, `[rows, 1, 1, tokens]`, or None where nothing is masked.
            positions: int64 `[rows, 1]`, or None where the layers are called without.
        """
        given = {} if positions is None else {_POSITIONS: positions}
        # The kernels read the mask's memory as if nothing lay between its elements.
        mask = None if mask is None else mask.contiguous()
        states = hidden
        for index, module in enumerate(self.modules):
            states = module.forward(states, attention_mask=mask, use_cache=False, **given)
            states = states[0] if isinstance(states, tuple) else states
            self.ledger.ran(index, kernel_probes.seen_tokens(module))
        if states.data_ptr() != hidden.data_ptr():
            hidden.copy_(states)

    def run_other(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The body of the op of a module outside the layers."""
        output: torch.Tensor = self._opaque[index](hidden)
        return output

    def other_width(self, index: int) -> int:
        """How wide the output of a module outside the layers is."""
        return int(self._opaque[index].weight.shape[0])

    def tensors(self) -> list[torch.Tensor]:
        """What the containers read."""
        return [tensor for module in self.modules for tensor in module.parameters()]


@contextlib.contextmanager
def _standing_in(calls: list[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    before = [module.__dict__.get("forward") for module, _ in calls]
    try:
        # Not setattr: it would look the name up among parameters and modules first, at every step.
        for module, call in calls:
            module.__dict__["forward"] = call
        yield
    finally:
        for (module, _), forward in zip(calls, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _layer_call(handle: int, index: int, layer: torch.nn.Module, module: Any) -> Callable[..., Any]:
    """What stands in for a layer's forward in a step: the first stands for all, the others hand on. Traceable.

    An op for each layer would have the same outcome; tracing and compiling it costs more the deeper a model is. That
    nothing happens between layers, and that all are called alike, shows in admission.
    """
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    config = module.config
    in_tuple = bool(config.return_tuple or config.return_single_tuple)

    def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        hidden = given.pop("hidden_states")
        mask, positions = given.pop(_MASK, None), given.pop(_POSITIONS, None)
        for name, value in given.items():
            if name not in _UNUSED and value is not None:
                raise NotExpressedError(f"a layer is called with {name}")
        if index == 0:
            hidden = hidden.clone()
            torch.ops.hepatch.containers(hidden, mask, positions, handle)
        return (hidden,) if in_tuple else hidden

    return forward


def _other_call(handle: int, index: int) -> Callable[..., Any]:
    def forward(_: Any, hidden: torch.Tensor) -> Any:
        return torch.ops.hepatch.outside_layers(hidden, handle, index)

    return forward


@torch.library.custom_op("hepatch::containers", mutates_args=("hidden",))
def containers_op(hidden: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, handle: int) -> None:
    """Runs the containers of the stack `handle`. What they write beside `hidden`, their workspace, is theirs alone."""
    _stacks[handle].run(hidden, mask, positions)


@containers_op.register_fake
def _(hidden: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, handle: int) -> None:
    return None


@torch.library.custom_op("hepatch::outside_layers", mutates_args=())
def outside_layers_op(hidden: torch.Tensor, handle: int, index: int) -> torch.Tensor:
    """Runs what stock puts in for a norm or projection outside the layers of the stack `handle`."""
    return _stacks[handle].run_other(index, hidden)


@outside_layers_op.register_fake
def _(hidden: torch.Tensor, handle: int, index: int) -> torch.Tensor:
    return hidden.new_empty((*hidden.shape[:-1], _stacks[handle].other_width(index)))


class WorkspaceKV:
    """The keys and values that DeepSpeed's kernels keep in their shared workspace, as the loop sees them.

    Attributes:
        tokens: capacity of the buffers beside it, rows times positions.
        nbytes: none of its own; the workspace is the engine's.
        generation: never changes; where the workspace is, `Containers` knows.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.nbytes = 0
        self.generation = 0

    def reserve(self, tokens: int) -> None:
        """Makes room for rows times positions; the workspace itself is made by `Containers`.

        Nothing to spare: the largest call is known, and a buffer that moves voids the recordings of every position.
        """
        self.tokens = max(self.tokens, tokens)

    def turn(self, rows: int, window: int) -> None:
        """Nothing: the kernels find their place by their counter."""


class KernelsForward:
    """A model's forward through its containers.

    Args:
        model: a causal LM of transformers.
        stack: its containers.

    Source: the parameters of ``forward`` are probed. Models that take no cache object (``_supports_cache_class``) read
    the length of the sequence from the shape of a tuple of keys and values; the others from ``cache_position``.
    """

    # A key is recorded at its first visit, once the kernels have run on the stream of the captures.
    records_at_once = True

    def __init__(self, model: Any, stack: ContainerStack) -> None:
        self.model = model
        self.stack = stack
        parameters = probes.forward_parameters(model)
        self.takes_position_ids = "position_ids" in parameters
        self.takes_cache_position = "cache_position" in parameters
        self.counts_by_cache = not probes.supports_cache_class(model)

    def new_kv(self) -> WorkspaceKV:
        """Where a batch's keys and values are accounted for."""
        return WorkspaceKV()

    def decoder(self, kv: WorkspaceKV, state: Any) -> KernelsDecoder:
        """Single steps over the workspace."""
        return KernelsDecoder(self, state)

    def prefill(self, kv: WorkspaceKV, prompt: Prompt) -> torch.Tensor:
        """Runs a prompt through the containers, as the eager engine does.

        Args:
            kv: unused.
            prompt: the prompt; at least two columns, since the kernels take one for a decode step.

        Returns:
            Logits of the last position, `[batch, vocabulary]`, in the model's dtype.
        """
        stack = self.stack
        stack.ledger.lose()
        stack.before_prompt()
        kwargs = {"cache_position": torch.arange(prompt.ids.shape[1], device=prompt.ids.device), **prompt.model_kwargs}
        inputs = self.model.prepare_inputs_for_generation(prompt.ids, **kwargs)
        with stack.in_force():
            output = self.model(**inputs, return_dict=True)
        stack.prompt_has_run(prompt.ids.shape[1])
        return last_logits(output)

    def returned_cache(self, kv: WorkspaceKV, prompt: Prompt, sequences: torch.Tensor) -> Any:
        """A cache of transformers' own kind over what was generated, made by the model's own layers.

        The kernels keep theirs where no caller can use it.

        Args:
            kv: unused.
            prompt: the prompt of the call.
            sequences: int64 `[batch, length]`.
        """
        mask = prompt.mask
        known = sequences[:, :-1]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], known.shape[1] - mask.shape[1])], dim=-1)
        return self.model(input_ids=known, attention_mask=mask, use_cache=True, return_dict=True).past_key_values


class KernelsDecoder:
    """Single steps of a model through its containers.

    Args:
        forward: the model and its containers.
        state: where position and mask are, a `StepState` or something like it.
    """

    def __init__(self, forward: KernelsForward, state: Any) -> None:
        self._forward = forward
        self._state = state
        self._heads, _ = probes.attention_heads(forward.model)
        self._layers = len(forward.stack.containers)
        self._hooks = IdleHooks(probes.inspect_model(forward.model).idle_hooks)

    def notice(self, idle_hooks: list[dict[int, Any]]) -> None:
        """Takes note of hooks."""
        self._hooks.notice(idle_hooks)

    def put_back(self) -> None:
        """The model runs its own layers and has its hooks, wherever a step was left."""
        self._forward.stack.step_aside()
        self._hooks.put_back()

    def turn(self) -> None:
        """Nothing: there are no faces."""

    def compile(self, backend: str, exact: bool) -> None:
        """Nothing: containers run as they are."""

    def signature(self) -> None:
        """Nothing is baked in that the engine does not look at itself: addresses, and the containers' structure."""

    def take_ran(self) -> bool:
        """Whether something ran whose signature is wanted: never."""
        return False

    def begin(self, window: int, *, replay: bool) -> None:
        """A step for the key's window is about to run; the window holds the token that it makes as well."""
        self._forward.stack.begin(window - 1, replay=replay)

    def end(self, *, replay: bool) -> None:
        """The step is over."""
        self._forward.stack.end(replay=replay)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """To be held around every `step`, traced or compiled."""
        with self._forward.stack.opaque(), self._hooks.emptied():
            yield

    def step(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One decode step, traceable without a graph break.

        Args:
            tokens: int64 `[rows, 1]`.
            mask: int64 `[rows, window]`, 1 where a position is no padding; the last column, the new token's, is left
                out.
            positions: int64 `[rows, 1]`, the rows' own positions, padding not counted.

        Returns:
            Logits `[rows, vocabulary]`.
        """
        forward = self._forward
        seen = mask[:, :-1]
        extra: dict[str, Any] = {}
        if forward.takes_position_ids:
            extra["position_ids"] = positions
        if forward.takes_cache_position:
            extra["cache_position"] = self._state.position
        if forward.counts_by_cache:
            # Only its length is looked at: the tokens before this one.
            stored = seen.new_empty(()).expand(seen.shape[0], self._heads, seen.shape[1] - 1, 1)
            extra["past_key_values"] = ((stored, stored),) * self._layers
        # forward, not __call__: DeepSpeed's hooks on the root module cannot be traced.
        output = forward.model.forward(
            input_ids=tokens, attention_mask=seen, use_cache=False, return_dict=True, **extra
        )
        return last_logits(output)
