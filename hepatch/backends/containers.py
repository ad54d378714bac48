"""DeepSpeed's containers of one engine: what has to hold before they run, and when they do."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from hepatch import kernel_probes, probes
from hepatch.backends.backend import Backend
from hepatch.recovery import LayersStreamer
from hepatch.region_store import ExactLeases

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from hepatch.backends import KV
    from hepatch.backends.kernels import ContainerStack
    from hepatch.generate_call import GenerateCall
    from hepatch.settings import Settings


class WorkspaceError(RuntimeError):
    """DeepSpeed's workspace cannot hold a call; nothing was written."""


class Containers(Backend):
    """The containers of one engine.

    Args:
        engine: a `DeepSpeedHybridEngine` whose containers were admitted.
        model: its causal LM.
        trained: what stock has frozen while it built the containers.

    Attributes:
        forward: the model's forward through them; `container_admission` has shown it to be right.
        stack: what a decode step runs.
    """

    name = "kernels"

    def __init__(self, engine: Any, model: Any, trained: Iterable[torch.nn.Parameter] = ()) -> None:
        from hepatch.backends.kernels import ContainerStack, KernelsForward

        containers = list(engine._inference_containers)
        self._engine = weakref.ref(engine)
        self.stack: ContainerStack = ContainerStack(
            list(engine._orig_modules), containers, kernel_probes.other_modules(engine)
        )
        self.forward = KernelsForward(model, self.stack)
        self._tokens = int(containers[0].module.config.max_out_tokens)
        self._generation = 0
        self._first = containers[0]
        self._tensors = self.stack.tensors()
        self._looked_at: int | None = None
        self._unseen: str | None = None
        self._rows = 0
        self._fusions = 0
        self._mark: object = None
        # What stock puts in for projections outside the layers freezes their weights, and they would never train.
        for parameter in trained:
            parameter.requires_grad_(True)
        # Stock leads the model's generate to the engine's. Nothing of the engine stays on the model, so that its copies
        # are ordinary; the class's own generate reaches the region as well.
        engine.module.__dict__.pop("generate", None)
        # One object, so that a release by hand is seen. Not setattr: it is a module, and some releases of DeepSpeed do
        # not find an engine's submodules.
        engine.__dict__["workspace"] = self._first.module.workspace
        self.resume()

    def facts(self, rows: int | None, weights: list[torch.Tensor], settings: Settings) -> dict[str, Any]:
        """DeepSpeed's containers count as none: they stand in for no layer but within a call that a region serves."""
        return {
            "containers": 0,
            # As asked for, or fewer where memory was short when the workspace was made.
            "max_out_tokens": self._tokens,
            "workspace": None if rows is None else self._no_room(rows),
            "unseen_weight": self._unseen_weight(weights),
        }

    def unsupported(self, model_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """The kernels count positions by themselves."""
        if model_kwargs.get("position_ids") is None:
            return ()
        return ("position_ids of the caller's, which DeepSpeed's kernels do not read",)

    def leases(self, settings: Settings) -> ExactLeases:
        """A recording has the position baked in."""
        return ExactLeases()

    def most_recordings(self, settings: Settings) -> int:
        """`HEPATCH_MAX_POSITIONS`."""
        return settings.max_positions

    def least_sizes(self) -> dict[str, int]:
        """The largest there can be, which are known: one buffer that moved would void a recording for each position."""
        return {"least_rows": self._rows, "least_tokens": self._rows * (self._tokens + 1)}

    def needed_bytes(self, kv: KV | None, rows: int, length: int, settings: Settings) -> int:
        """The workspace for so many rows; its positions are fixed."""
        return self._workspace_bytes(rows)

    def nbytes(self, kv: KV | None) -> int:
        """The workspace."""
        return self._workspace_bytes(self._rows)

    def _workspace_bytes(self, rows: int) -> int:
        return kernel_probes.workspace_bytes(self._first, rows, len(self.stack.layers))

    def suspend(self) -> None:
        """Leaves the containers to stock, which has to make the workspace where there is none."""
        if not kernel_probes.workspace_is_allocated(self._first):
            kernel_probes.allow_own_allocation(self.stack.containers, True)

    def resume(self) -> None:
        """Takes the containers back."""
        kernel_probes.allow_own_allocation(self.stack.containers, False)
        self.stack.step_aside()

    def step_aside(self) -> None:
        """The model runs its own layers."""
        self.stack.step_aside()

    def _unseen_weight(self, weights: list[torch.Tensor]) -> str | None:
        """The name of a weight that the kernels would not see, or None. Loaded and moved weights are fused again first.

        Args:
            weights: the model's own; where none has moved since the last answer, the answer stands.
        """
        if probes.addresses([*weights, *self._tensors]) != self._looked_at:
            self._unseen = self._look_for_unseen()
            # Fusing may have moved some.
            self._looked_at = probes.addresses([*weights, *self._tensors])
        return self._unseen

    def memory(self) -> tuple[int, int | None]:
        """The workspace and the weights, as far as `facts` has seen.

        Where they moved everything recorded is dropped: the old recordings of each position would stay for good.
        """
        return self._generation, self._looked_at

    def _look_for_unseen(self) -> str | None:
        for index, (container, layer) in enumerate(zip(self.stack.containers, self.stack.layers, strict=True)):
            # Before anything is fused: it would make the model's weights what the container was built with.
            name = kernel_probes.unlike_weight(container, layer)
            if name is None:
                kernel_probes.fuse_split_weights(container)
                name = kernel_probes.unseen_weight(container.module, layer)
            if name is not None:
                return f"{name} of layer {index}"
        for own, stock in self.stack.others:
            name = kernel_probes.unseen_weight(stock, own)
            if name is not None:
                return f"{name} of {type(own).__name__}"
        return None

    def _no_room(self, rows: int) -> str | None:
        """Why the workspace cannot be made as large as `rows` rows need, or None."""
        if self._holds(rows) or self.stack.in_python:
            return None
        released = not kernel_probes.workspace_is_allocated(self._first)
        held = 0 if released else self._workspace_bytes(self._rows)
        return kernel_probes.room_for_workspace(self._workspace_bytes(rows), held)

    def prepare(self, rows: int, prompt: int, total: int) -> None:
        """Has the workspace hold `rows` rows; a larger one takes the place of what is there, whose recordings are void.

        Raises:
            WorkspaceError: there is no memory for it.
        """
        if self._holds(rows):
            return
        obstacle = self._no_room(rows)
        if obstacle is not None:
            raise WorkspaceError(obstacle)
        if not self._made_by_others():
            # Never smaller, so that batches in turns record once.
            rows = max(rows, self._rows)
        self.stack.ledger.lose()
        kernel_probes.allocate_workspace(self._first, rows, prompt, len(self.stack.layers))
        self._mark = kernel_probes.mark_workspace(self._first)
        self._rows = rows
        self._generation += 1
        self._tokens = self.stack.capacity()
        # The last token is never run through the model.
        if total - 1 > self._tokens:
            # The kernels would write past the end of a head's memory without a word.
            raise WorkspaceError(
                f"DeepSpeed's workspace has {self._tokens} positions for {rows} rows, {total - 1} are needed"
            )

    def _holds(self, rows: int) -> bool:
        allocated = kernel_probes.workspace_is_allocated(self._first)
        return rows <= self._rows and allocated and not self._made_by_others()

    def _made_by_others(self) -> bool:
        """Whether the workspace was made anew, for other rows, since it was made here: as for a shared prefill."""
        return self._rows > 0 and kernel_probes.workspace_mark(self._first) not in (self._mark, False)

    @contextlib.contextmanager
    def engine_generates(self) -> Iterator[None]:
        """Around the engine's own `generate`, which fuses LoRA weights into the model's for its length.

        One within another, from a streamer, fuses them once more. Stock takes them out again only where the model's
        generate returns; here it is done where it raises as well, or every later step would train wrong weights.
        """
        engine = self._engine()
        if engine is None or not self._has_lora():
            yield
            return
        before, given = self._fusions, engine._generate
        generate = getattr(given, "_hepatch_unfuses_after", given)

        def unfuses_after_errors(*args: Any, **kwargs: Any) -> Any:
            try:
                return generate(*args, **kwargs)
            except BaseException:
                engine.unfuse_lora_weight()
                raise

        unfuses_after_errors.__dict__["_hepatch_unfuses_after"] = generate
        self._fusions += 1
        engine._generate = unfuses_after_errors
        try:
            yield
        finally:
            self._fusions = before
            engine._generate = given

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """LoRA is part of the weights: the kernels know nothing of it."""
        engine = self._engine()
        if engine is None or not self._has_lora() or self._fusions:
            yield
            return
        engine.fuse_lora_weight()
        self._fusions = 1
        try:
            yield
        finally:
            self._fusions = 0
            engine.unfuse_lora_weight()

    @contextlib.contextmanager
    def own_layers(self) -> Iterator[None]:
        """LoRA is beside the weights: the model's layers add it themselves."""
        engine, fusions = self._engine(), self._fusions
        if engine is None or not fusions:
            yield
            return
        for _ in range(fusions):
            engine.unfuse_lora_weight()
        self._fusions = 0
        try:
            yield
        finally:
            for _ in range(fusions):
                engine.fuse_lora_weight()
            self._fusions = fusions

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The model runs its own layers for a while in which containers are in force."""
        with self.own_layers(), self.stack.aside():
            yield

    def from_the_prompt(self, call: GenerateCall, streamer: Any) -> AbstractContextManager[Any]:
        """By containers the tokens are the eager engine's; by layers they may part from it where fp16 cannot tell."""
        self.stack.ledger.lose()
        return self._decoding(call, streamer)

    @contextlib.contextmanager
    def _decoding(self, call: GenerateCall, streamer: Any) -> Iterator[Any]:
        self.prepare(call.batch, call.prompt, call.max_length)
        with self.serving(), self.stack.in_force():
            yield None if streamer is None else LayersStreamer(streamer, self.aside)

    def _has_lora(self) -> bool:
        engine = self._engine()
        return engine is not None and len(engine.all_lora_params) > 0
