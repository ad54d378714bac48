"""The native backend: the model's own layers over a static KV cache.

Prefill runs eagerly and is, operation for operation, what transformers' own prefill over an empty dynamic cache is; its
keys and values are copied into the static buffers on the way. Decode steps go through layers that write one position of
a buffer's current face and read all of it.

The model is given a full-length 2D mask and the position as a tensor, so that it builds its own mask: sliding windows,
eager attention's additive masks and Bloom's alibi all come out as the model means them. Every layer keeps its full
length; where the model has a sliding window its own mask applies it. Columns beyond the position are open in the 2D
mask and closed by the causal rule; `admit` checks by behaviour that a model really closes them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hepatch import probes
from hepatch.backends import attention
from hepatch.backends.layers import LayerCalls, LayerStack
from hepatch.backends.static_kv import StaticKV
from hepatch.backends.step import IdleHooks, StepView, last_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hepatch.generate_call import Prompt


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What both kinds of layer answer to transformers. It never owns memory; the `StaticKV` does."""

    is_sliding = False
    is_compileable = False

    def __init__(self, kv: StaticKV, index: int) -> None:
        super().__init__()
        self.kv = kv
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the `StaticKV` allocates."""

    def get_max_length(self) -> int:
        """The longest sequence that fits (transformers 5)."""
        keys = self.kv.keys[self.index]
        return 0 if keys is None else keys.shape[0]

    def get_max_cache_shape(self) -> int:
        """The longest sequence that fits (transformers 4)."""
        return self.get_max_length()


class PromptLayer(_Layer):
    """A layer during prefill: looks like an empty dynamic cache and copies what it is given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `[batch, heads, prompt, dim]` and returns it."""
        self.kv.write_prompt(self.index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Nothing has been cached before a prompt."""
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Key length and offset; transformers 4 hands over the positions instead of their number."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0


class DecodeLayer(_Layer):
    """A layer during a decode step: one position of the current face is written, all of the face is read."""

    is_compileable = True

    def __init__(self, kv: StaticKV, index: int, view: Any, own_attention: bool) -> None:
        super().__init__(kv, index)
        self.view = view
        self.own_attention = own_attention

    def turn(self) -> None:
        """Takes the faces that are current."""
        self.keys, self.values = self.kv.keys[self.index], self.kv.values[self.index]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[rows, heads, 1, dim]` at the position and returns the window, `[rows, heads, window, dim]`.

        With hepatch's attention both are left to it, and what came in is returned.
        """
        keys, values, position = self.keys, self.values, self.view.position
        assert keys is not None
        assert values is not None
        if not self.own_attention:
            attention.HANDOVER.stored = keys, values, position
            return key_states, value_states
        keys.index_copy_(0, position, key_states.permute(2, 0, 1, 3))
        values.index_copy_(0, position, value_states.permute(2, 0, 1, 3))
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    def get_seq_length(self, *args: Any) -> torch.Tensor:
        """Tokens cached before this step, as a tensor: the query's offset in the model's causal mask."""
        position: torch.Tensor = self.view.position
        return position[0]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Key length and offset."""
        return self.view.mask.shape[0], 0


class NativeForward:
    """A model's forward over a static KV cache: the prompt, and the ways to decode.

    Args:
        model: a causal LM of transformers. Kept by reference; nothing stays set on it.
        own_attention: decode with the model's own attention function instead of hepatch's op.
        layered: decode with the model's layers as opaque ops.

    Source: the parameters of ``forward`` (``cache`` since transformers 5.20, ``past_key_values`` before;
    ``cache_position`` up to 5.17) are probed, never inferred from a version.
    """

    records_at_once = False

    def __init__(self, model: Any, *, own_attention: bool = False, layered: bool = True) -> None:
        self.model = model
        self.own_attention = own_attention
        self.layered = layered
        self.calls = LayerCalls()
        parameters = probes.forward_parameters(model)
        self.cache_keyword = probes.cache_keyword(model)
        self.takes_position_ids = "position_ids" in parameters
        self.takes_cache_position = "cache_position" in parameters
        self.keep_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def new_kv(self) -> StaticKV:
        """An empty KV cache for this model."""
        return StaticKV(probes.layer_count(self.model))

    def decoder(self, kv: StaticKV, state: Any) -> Decoder:
        """Single steps over `kv`."""
        return Decoder(self, kv, state)

    def prefill(self, kv: StaticKV, prompt: Prompt) -> torch.Tensor:
        """Runs a prompt eagerly.

        Args:
            kv: where keys and values go.
            prompt: what was asked.

        Returns:
            Logits of the last position, `[batch, vocabulary]`, in the model's dtype.
        """
        input_ids, attention_mask, position_ids = prompt.ids, prompt.mask, prompt.positions
        cache = Cache(layers=[PromptLayer(kv, index) for index in range(len(kv.keys))])
        closed = None if attention_mask is None else attention_mask == 0
        # Waits for the device, once, and spares two kernels a layer where no row is padded.
        kv.padding = None if closed is None or not bool(closed.any()) else closed.t()[:, :, None, None]
        extra: dict[str, Any] = dict(self.keep_last)
        if self.takes_position_ids:
            extra["position_ids"] = position_ids
        if self.takes_cache_position:
            extra["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)
        # __call__, not forward: hooks that DeepSpeed keeps on the root module run once a prompt, as in stock.
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=True,
            return_dict=True,
            **{self.cache_keyword: cache},
            **extra,
        )
        return last_logits(output)

    def returned_cache(self, kv: StaticKV, prompt: Prompt, sequences: torch.Tensor) -> Any:
        """A cache of transformers' own kind with a call's keys and values: the last token was never forwarded.

        A new one: that which transformers prepared stays empty, for a recovery that may still come.

        Args:
            kv: the cache of the call.
            prompt: the prompt of the call.
            sequences: int64 `[batch, length]`, what was generated.
        """
        cache = probes.own_cache(self.model)
        for index in range(len(kv.keys)):
            stored = kv.read(index, sequences.shape[0], sequences.shape[1] - 1)
            if stored is not None:
                cache.update(*stored, index)
        return cache

    def without_cache(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Logits `[batch, vocabulary]` of the last position by the model's plain forward, for comparison."""
        extra: dict[str, Any] = {"position_ids": position_ids} if self.takes_position_ids else {}
        return last_logits(
            self.model.forward(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True, **extra
            )
        )


class Decoder:
    """Single steps of a model over a static KV cache.

    Args:
        forward: the model and how to decode it.
        kv: the cache.
        state: where position and mask are, a `StepState` or `StepView`.

    Raises:
        NotLayeredError: `forward` wants layers as ops, and the model's cannot be.
    """

    def __init__(self, forward: NativeForward, kv: StaticKV, state: Any) -> None:
        self._forward = forward
        self._state = state
        self._config = probes.text_config(forward.model)
        self._attention = attention.named(self._config)
        self._hooks = IdleHooks(probes.inspect_model(forward.model).idle_hooks)
        own = forward.own_attention
        layers = range(len(kv.keys))
        self._layers = [DecodeLayer(kv, index, state, own) for index in layers]
        self._cache = Cache(layers=self._layers)
        self.stack: LayerStack | None = None
        if forward.layered:
            # The position comes with the op; a layer has no use for the mask's size.
            view = StepView(state.position)
            inner = [DecodeLayer(kv, index, view, own) for index in layers]
            self.stack = LayerStack(forward.model, inner, view, state, forward.calls)

    def notice(self, idle_hooks: list[dict[int, Any]]) -> None:
        """Takes note of hooks, and of the attention that the configuration names."""
        self._hooks.notice(idle_hooks)
        self._attention = attention.named(self._config)

    def put_back(self) -> None:
        """The model has its layers, its attention and its hooks, wherever a step was left."""
        if self.stack is not None:
            self.stack.put_back()
        attention.name_again(self._config, self._attention)
        self._hooks.put_back()

    def turn(self) -> None:
        """Takes the faces of the KV cache that are current."""
        for layer in self._layers:
            layer.turn()
        if self.stack is not None:
            self.stack.turn()

    def compile(self, backend: str, exact: bool) -> None:
        """Has the layers compiled, where they are ops; see `LayerStack.compile`."""
        if self.stack is not None:
            self.stack.compile(backend, exact)

    def signature(self) -> int | None:
        """What a recording bakes in of the layers, where they are ops; see `LayerStack.signature`."""
        return None if self.stack is None else self.stack.signature()

    def take_ran(self) -> bool:
        """Whether a layer that is an op has run from the host since this was last asked."""
        return self.stack is not None and self.stack.take_ran()

    def begin(self, window: int, *, replay: bool) -> None:
        """Nothing: the step finds its position on the device."""

    def end(self, *, replay: bool) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """To be held around every `step`, traced or compiled.

        The model finds its attention and layers replaced and idle hooks gone.
        """
        with contextlib.ExitStack() as replaced:
            if not self._forward.own_attention:
                replaced.enter_context(attention.chosen(self._config))
            if self.stack is not None:
                replaced.enter_context(self.stack.opaque())
            replaced.enter_context(self._hooks.emptied())
            yield

    def step(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One decode step, traceable without a graph break.

        Args:
            tokens: int64 `[rows, 1]`.
            mask: int64 `[rows, window]`, 1 where a position is no padding.
            positions: int64 `[rows, 1]`, the rows' own positions, padding not counted.

        Returns:
            Logits `[rows, vocabulary]`.
        """
        forward = self._forward
        extra: dict[str, Any] = dict(forward.keep_last)
        if forward.takes_position_ids:
            extra["position_ids"] = positions
        if forward.takes_cache_position:
            extra["cache_position"] = self._state.position
        # forward, not __call__: DeepSpeed's hooks on the root module cannot be traced.
        output = forward.model.forward(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{forward.cache_keyword: self._cache},
            **extra,
        )
        return last_logits(output)
