"""DeepSpeed's containers of one engine: whether they are built, who may use them, and what has to hold before they run.

Containers share class-level counters, one counter of the position and one workspace in a process, so one engine at a
time has them; every other engine's models run their own layers. They are built only after a disposable copy has shown
that they compute what the model's layers compute (`container_admission`).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

from hepatch import kernel_probes, probes, settings
from hepatch.backends import container_admission
from hepatch.backends.container_admission import ContainersNotAdmittedError
from hepatch.errors import first_line
from hepatch.report import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hepatch.backends.kernels import ContainerStack, KernelsForward

_OBSTACLE = "_hepatch_no_containers"
_TRAINED = "_hepatch_trained_before_containers"
_owner: weakref.ref[Any] | None = None


class WorkspaceError(RuntimeError):
    """DeepSpeed's workspace cannot hold a call; nothing was written."""


def choose_policies(engine: Any, populate: Callable[[], None]) -> None:
    """Sets the engine's policies: stock's where its containers are admitted, none where they are not.

    Args:
        engine: a `DeepSpeedHybridEngine` under construction, its model in place and its containers not yet built.
        populate: stock's `populate_all_inference_policies`, bound to the engine.
    """
    global _owner  # noqa: PLW0603 - class counters, counter and workspace belong to the process, and so does their owner
    try:
        obstacle = _not_wanted(engine) or _taken()
        if obstacle is None:
            policies = kernel_probes.layer_policies(engine, populate)
            everything = engine.inference_policies
            container_admission.admit(engine, policies)
            engine.inference_policies = everything
            # What an engine before this one has left; the layers of this one are numbered from zero.
            kernel_probes.set_class_state(kernel_probes.fresh_class_state())
            engine.__dict__[_TRAINED] = [
                parameter for parameter in engine.module.parameters() if parameter.requires_grad
            ]
            _owner = weakref.ref(engine)
            return
    except ContainersNotAdmittedError as error:
        obstacle = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a policy that raises or exits costs the containers, never the run
        obstacle = f"DeepSpeed's containers cannot be built ({type(error).__name__}: {first_line(error)})"
        logger.debug("hepatch: the traceback of that", exc_info=error)
    engine.inference_policies = {}
    engine.__dict__[_OBSTACLE] = obstacle


def obstacle_of(engine: Any) -> str | None:
    """Why this engine has no containers of ours; None where it has, or was built before hepatch was on."""
    found: str | None = engine.__dict__.get(_OBSTACLE)
    return found


def own_containers(engine: Any) -> bool:
    """Whether the engine's containers were admitted by hepatch."""
    return _owner is not None and _owner() is engine and bool(getattr(engine, "_inference_containers", ()))


def _not_wanted(engine: Any) -> str | None:
    backend = settings.read().backend
    facts = probes.engine_facts(engine)
    model = probes.generation_model(engine.module)
    if facts["requested"] is False:
        return "the ds_config asks for no graph capture"
    if backend == "native":
        return "HEPATCH_BACKEND=native asks for the model's own layers"
    if model is None:
        return "there is no model with generate"
    if facts["zero_stage"] >= 3:  # noqa: PLR2004 - the stage that partitions the weights
        return "ZeRO stage 3 leaves containers no weights"
    if facts["release_inference_cache"]:
        return "release_inference_cache frees the workspace between generates"
    if facts["inference_tp_size"] > 1:
        return "collectives inside a region are not verified"
    if backend == "auto" and probes.static_cache_obstacle(model) is None:
        # Not slower, needs no op to be built, keeps one graph for many positions, and has no counter on the host.
        return "the native backend serves this model"
    return None


def _taken() -> str | None:
    global _owner  # noqa: PLW0603 - see choose_policies
    if _owner is not None:
        if _owner() is not None:
            # An engine that was let go may still hang in a cycle.
            gc.collect()
        if _owner() is not None:
            return (
                "another engine of this process has DeepSpeed's containers, which share one workspace and one position"
            )
        _owner = None
        kernel_probes.set_class_state(kernel_probes.fresh_class_state())
    if kernel_probes.class_state().layers:
        return "containers that were built without hepatch may still be in use in this process"
    return None


class Containers:
    """The containers of one engine.

    Args:
        engine: a `DeepSpeedHybridEngine` whose containers were admitted.
        model: its causal LM.

    Attributes:
        forward: the model's forward through them.
    """

    def __init__(self, engine: Any, model: Any) -> None:
        from hepatch.backends.kernels import ContainerStack, KernelsForward

        containers = list(engine._inference_containers)
        self._engine = weakref.ref(engine)
        self.stack: ContainerStack = ContainerStack(
            list(engine._orig_modules), containers, kernel_probes.other_modules(engine)
        )
        self.forward: KernelsForward = KernelsForward(model, self.stack)
        self._tokens = int(containers[0].module.config.max_out_tokens)
        self.generation = 0
        self._first = containers[0]
        self._tensors = self.stack.tensors()
        self._looked_at: int | None = None
        self._unseen: str | None = None
        self._rows = 0
        self._fusions = 0
        self._mark: object = None
        # What stock puts in for projections outside the layers freezes their weights, and they would never train.
        for parameter in engine.__dict__.pop(_TRAINED, ()):
            parameter.requires_grad_(True)
        # Stock leads the model's generate to the engine's. Nothing of the engine stays on the model, so that its copies
        # are ordinary; the class's own generate reaches the region as well.
        engine.module.__dict__.pop("generate", None)
        # One object, so that a release by hand is seen. Not setattr: it is a module, and some releases of DeepSpeed do
        # not find an engine's submodules.
        engine.__dict__["workspace"] = self._first.module.workspace
        self.resume()

    @property
    def max_tokens(self) -> int:
        """Positions of the workspace: as asked for, or fewer where memory was short when it was made."""
        return self._tokens

    @property
    def rows(self) -> int:
        """Rows that the workspace holds."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return self.workspace_bytes(self._rows)

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of a workspace for `rows` rows."""
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

    def unseen_weight(self, weights: list[torch.Tensor]) -> str | None:
        """The name of a weight that the kernels would not see, or None. Loaded and moved weights are fused again first.

        Args:
            weights: the model's own; where none has moved since the last answer, the answer stands.
        """
        if probes.addresses([*weights, *self._tensors]) != self._looked_at:
            self._unseen = self._look_for_unseen()
            # Fusing may have moved some.
            self._looked_at = probes.addresses([*weights, *self._tensors])
        return self._unseen

    @property
    def memory(self) -> tuple[int, int | None]:
        """Changes when the workspace or a weight has moved, as far as `unseen_weight` has seen."""
        return self.generation, self._looked_at

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

    def no_room(self, rows: int) -> str | None:
        """Why the workspace cannot be made as large as `rows` rows need, or None."""
        if self._holds(rows) or self.stack.in_python:
            return None
        released = not kernel_probes.workspace_is_allocated(self._first)
        held = 0 if released else self.workspace_bytes(self._rows)
        return kernel_probes.room_for_workspace(self.workspace_bytes(rows), held)

    def make_room(self, rows: int, prompt: int, length: int) -> None:
        """Has the workspace hold `rows` rows; a larger one takes the place of what is there, whose recordings are void.

        Args:
            rows: of the call.
            prompt: columns of the prompt.
            length: positions that the call writes.

        Raises:
            WorkspaceError: there is no memory for it.
        """
        if self._holds(rows):
            return
        obstacle = self.no_room(rows)
        if obstacle is not None:
            raise WorkspaceError(obstacle)
        if not self._made_by_others():
            # Never smaller, so that batches in turns record once.
            rows = max(rows, self._rows)
        self.stack.ledger.lose()
        kernel_probes.allocate_workspace(self._first, rows, prompt, len(self.stack.layers))
        self._mark = kernel_probes.mark_workspace(self._first)
        self._rows = rows
        self.generation += 1
        self._tokens = self.stack.capacity()
        if length > self._tokens:
            # The kernels would write past the end of a head's memory without a word.
            raise WorkspaceError(
                f"DeepSpeed's workspace has {self._tokens} positions for {rows} rows, {length} are needed"
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
    def weights_for_kernels(self) -> Iterator[None]:
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
    def weights_for_layers(self) -> Iterator[None]:
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
        with self.weights_for_layers(), self.stack.aside():
            yield

    def _has_lora(self) -> bool:
        engine = self._engine()
        return engine is not None and len(engine.all_lora_params) > 0
