"""What hepatch keeps for an engine: the model it serves, its settings, regions, caches and counters.

An attachment hangs on its engine, as one plain attribute, and dies with it. Models are found by identity in a weak map;
nothing of ours sits on a model, so that deep copies, pickles and state dicts stay ordinary. A map from engines to
attachments would never let go: a model's hooks reach its engine, and a region reaches its model.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hepatch import activation, probes, settings
from hepatch.errors import RefusedError, first_line
from hepatch.facts import UNSET, Call, Facts
from hepatch.guards import Refusal, judge
from hepatch.region_store import Lease, RegionStore
from hepatch.report import Counters, LastCall, OnceLog, Report, logger, refusal_line

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from hepatch.backends import KV, Forward
    from hepatch.region import Region
    from hepatch.sampling import Request
    from hepatch.step_state import StepState

_ATTRIBUTE = "_hepatch_attachment"
_MIB = 2**20
# After a failure that follows success: calls that stay eager before a region is tried again, and how often it is tried.
RETRY_AFTER_CALLS = 16
MOST_RETRIES = 3
MOST_RELOCATIONS = 64

_by_model: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
_live: weakref.WeakSet[Attachment] = weakref.WeakSet()


class _CallInProgress:
    """A call that a region serves; it exists as long as that."""


class Attachment:
    """One engine's share of hepatch.

    Args:
        engine: a `DeepSpeedHybridEngine`, constructed.

    Attributes:
        model: the causal LM inside `engine.module`, or None.
        settings: as the environment was when the engine was built, or at the last `reset`.
        counters: for the report.
        last_call: the latest generate.
        kv, state, regions: what decode steps work on; None until the first one, and after `release`.
        backend: what serves it.
        lock: held by the thread that generates.
    """

    def __init__(self, engine: Any) -> None:
        from hepatch.backends import ownership

        self.settings = settings.read()
        self.model = probes.generation_model(engine.module)
        self.counters = Counters()
        self.last_call: LastCall | None = None
        self.kv: KV | None = None
        self.state: StepState | None = None
        self.regions: RegionStore | None = None
        self._engine = weakref.ref(engine)
        self._said = OnceLog()
        self._memory: Hashable = None
        self._moving_memory: Hashable = None
        self._idle_hooks: list[dict[int, Any]] = []
        self._structure: int | None = None
        self._failure: str | None = None
        self._failures = 0
        self._eager_calls_left = 0
        self._in_progress: weakref.ref[_CallInProgress] | None = None
        self.lock = threading.RLock()
        self.backend = ownership.backend_of(engine, self.model)
        self.forward: Forward | None = self.backend.forward
        self._static_cache = self.backend.obstacle()
        self._tensors: list[torch.Tensor] = list(self.model.parameters()) if self.model is not None else []
        self._set_aside = probes.set_aside_decode_graphs(engine)

    @property
    def name(self) -> str:
        """Class name of the model, for messages."""
        if self.model is not None:
            return type(self.model).__name__
        engine = self._engine()
        return "?" if engine is None else type(engine.module).__name__

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.model is not None and self.model.training)

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def facts(self, call: Call | None, needed_bytes: int = 0) -> Facts:
        """What the guards are to judge now.

        Args:
            call: the generate at hand; None to ask about the engine alone.
            needed_bytes: KV cache that the call needs.
        """
        engine = self._engine()
        assert engine is not None
        foreign_hooks = self._inspect()
        some = None if self.regions is None else self.regions.any_region
        budget = self.settings.cache_mib
        return Facts(
            enabled=activation.is_on(),
            causal_lm=self.model is not None,
            model_name=self.name,
            static_cache=self._static_cache if self.model is not None else None,
            hooks=foreign_hooks,
            max_positions=None if self.model is None else probes.max_positions(self.model),
            weights_offloaded=probes.weights_offloaded(engine, self._tensors),
            compiler_missing=probes.compiler_obstacle(self.device, self.settings.compile_backend),
            thread=threading.get_ident(),
            region_thread=None if some is None else some.thread,
            autocast=probes.autocast_dtype(self.device),
            region_autocast=UNSET if some is None else some.autocast,
            failure=self._failure,
            cache_mib_needed=-(-needed_bytes // _MIB),
            cache_mib_budget=budget,
            call=call,
            **{
                **probes.engine_facts(engine),
                **self.backend.facts(None if call is None else call.rows, self._tensors, self.settings),
            },
        )

    def _inspect(self) -> tuple[str, ...]:
        """Looks the model over and returns its foreign hooks; one that is built otherwise than before starts afresh."""
        if self.model is None:
            return ()
        # What stock's train and eval leave on the layers is no change of the model.
        self.backend.step_aside()
        found = probes.inspect_model(self.model)
        self._idle_hooks, self._tensors = found.idle_hooks, found.tensors
        if self._structure not in (None, found.structure):
            self.drop_regions()
            self._begin_anew()
        self._structure = found.structure
        return found.foreign_hooks

    def _begin_anew(self) -> None:
        """Has the model admitted again at its next generate."""
        self.forward = self.backend.forward
        self._static_cache = self.backend.obstacle()

    def refuse(self, refusals: tuple[Refusal, ...]) -> str:
        """Logs refusals, once an engine and rule, and returns them as the reason of an eager call.

        Raises:
            RefusedError: under `HEPATCH_STRICT=1`.
        """
        lines = [refusal_line(self.name, refusal) for refusal in refusals]
        if self.settings.strict:
            raise RefusedError(" ".join(lines))
        for refusal, line in zip(refusals, lines, strict=True):
            self._said.warn(refusal.rule, line)
        if self._failure is not None:
            self._wait_for_retry()
        return "; ".join(f"[{refusal.rule}] {refusal.reason}" for refusal in refusals)

    def unreadable(self, error: Exception) -> None:
        """Takes note of a call that could not even be judged; it goes on eagerly."""
        reason = f"the call could not be read ({type(error).__name__}: {first_line(error)})"
        self.counters.eager_calls += 1
        self.last_call = LastCall("eager", reason, 0, 0, 0, 0)
        self._said.warn("unreadable", f"hepatch: eager for {self.name} [decode-mode]: {reason}. Please report this.")

    def fail(self, error: BaseException, doing: str) -> None:
        """Takes note of a failed region: drops every region and refuses the next calls.

        A compilation that never worked is not tried again before `reset`. One that fails after it has worked, such as a
        capture that something else in the process disturbed, is tried again a few times, each after some eager calls.

        Args:
            error: what was raised.
            doing: what was being done, for the message.
        """
        had_worked = self.counters.region_steps > 1
        self._failures += 1
        again = had_worked and self._failures <= MOST_RETRIES
        self._failure = f"{doing} failed with {type(error).__name__}: {first_line(error)}"
        self._eager_calls_left = RETRY_AFTER_CALLS if again else -1
        self.counters.failures.append(self._failure)
        logger.warning(
            "hepatch: %s for %s. The call goes on eagerly and loses nothing. %s.",
            self._failure,
            self.name,
            f"A region is tried again after {RETRY_AFTER_CALLS} calls"
            if again
            else "hepatch.reset(engine) tries again",
        )
        logger.debug("hepatch: the traceback of that failure", exc_info=error)
        self.drop_regions()

    def _wait_for_retry(self) -> None:
        if self._eager_calls_left > 0:
            self._eager_calls_left -= 1
            if self._eager_calls_left == 0:
                self._failure = None

    def admit(self) -> None:
        """Builds the model's forward over a static cache, once, and checks by behaviour that it is the model's own.

        The outcome, where the model fails, is an obstacle that the guards report from then on.
        """
        from hepatch.backends import admission

        assert self.model is not None
        if self.forward is not None or self._static_cache is not None:
            return
        try:
            self.forward = admission.admit(self.model, self.device)
        except admission.NotAdmittedError as error:
            self._static_cache = str(error)

    def ready(self, request: Request, call: tuple[int, int, int]) -> tuple[Region, Lease]:
        """Makes room for a call and returns its region, with the call's numbers loaded, and its keys.

        Args:
            request: how the call selects tokens.
            call: rows, columns of the prompt, prompt and new tokens.
        """
        from hepatch.step_state import StepState

        assert self.model is not None
        assert self.forward is not None
        self.backend.prepare(*call)
        if self._memory not in (None, self.backend.memory()):
            self.drop_regions()
        self._memory = self.backend.memory()
        if self.state is not None and self.state.relocations > MOST_RELOCATIONS:
            # Graphs that were recorded before stay until their region goes.
            self.drop_regions()
        if self.kv is None or self.state is None or self.regions is None:
            self.kv = self.forward.new_kv()
            self.state = StepState(self.device, probes.vocabulary(self.model), **self.backend.least_sizes())
            leases, most = self.backend.leases(self.settings), self.backend.most_recordings(self.settings)
            self.regions = RegionStore(self._build, leases, most)
        region = self.regions.region(request)
        lease = self.regions.lease(region, *call)
        if lease is None:
            # The bound on recordings: every graph goes, and compiling starts over.
            self.regions.drop()
            region = self.regions.region(request)
            lease = self.regions.lease(region, *call) or self.regions.one_key(*call)
        length = lease.window(call[2])
        self.kv.reserve(lease.rows * length)
        selection = request.selection
        self.state.reserve(
            lease.rows,
            self.kv.tokens,
            noise=selection.do_sample,
            scores=selection.scores,
            logits=selection.logits,
        )
        return region, lease

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """To be held while a region serves a call: its buffers hold one call at a time."""
        call = _CallInProgress()
        # Weakly: an interrupt may hit before it is taken back below, and a call that is gone is not in progress.
        self._in_progress = weakref.ref(call)
        try:
            yield
        finally:
            self._in_progress = None

    def unsupported(self, model_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Why a call that begins now is no plain decode step for this engine, one phrase a reason.

        Args:
            model_kwargs: what the caller gives the model.
        """
        # As from the streamer of one.
        nested = self._in_progress is not None and self._in_progress() is not None
        reasons = ("another generate of this engine is in progress",) if nested else ()
        return (*reasons, *self.backend.unsupported(model_kwargs))

    def refresh(self, region: Region) -> None:
        """After a prompt and before the first step: has graphs recorded anew where memory moved unseen by them."""
        assert self.kv is not None
        assert self.state is not None
        memory = self.backend.moving_memory(self.kv, self._tensors)
        if self._moving_memory not in (None, memory):
            self.state.relocate()
        self._moving_memory = memory
        region.refresh(self._idle_hooks)

    def _build(self, request: Request) -> Region:
        from hepatch.region import Region

        assert self.forward is not None
        assert self.kv is not None
        assert self.state is not None
        return Region(self.forward, self.kv, self.state, request, self.counters, self.settings.compile_backend)

    def needed_bytes(self, rows: int, length: int) -> int:
        """KV cache, in bytes, that the engine holds once it has served a call of this size."""
        return 0 if self._static_cache is not None else self.backend.needed_bytes(self.kv, rows, length, self.settings)

    def drop_regions(self) -> None:
        """Forgets the compiled steps and their recordings; the cache goes too, since only steps write it."""
        if self.regions is not None:
            self.regions.drop()
        self.kv = self.state = self.regions = self._memory = self._moving_memory = None

    def release(self) -> None:
        """`hepatch.release(engine)`: frees caches and graphs now; the next generate records again."""
        self.drop_regions()
        # What stands in for a layer's forward is tied to its stack in a circle, which would keep the KV cache until the
        # next collection.
        gc.collect()

    def reset(self) -> None:
        """Forgets failures and what was said, reads the environment again, and lets the next generate start afresh."""
        self.drop_regions()
        self.counters = Counters()
        self.settings = settings.read()
        self._failure = None
        self._failures = 0
        self._said.forget()
        self._begin_anew()

    def suspend(self) -> None:
        """`hepatch.disable()`: no regions, no caches, DeepSpeed's own decode graphs back in force."""
        self.drop_regions()
        self.backend.suspend()
        engine = self._engine()
        if engine is not None and self._set_aside is not None:
            probes.give_back_decode_graphs(engine, self._set_aside)
            self._set_aside = None

    def resume(self) -> None:
        """`hepatch.enable()` after `suspend`."""
        self.backend.resume()
        engine = self._engine()
        if engine is not None and self._set_aside is None:
            self._set_aside = probes.set_aside_decode_graphs(engine)

    def report(self) -> Report:
        """The state of this engine now."""
        refusals = judge(self.facts(Call(training=self.training, total_tokens=0)))
        active = not refusals
        return Report(
            active=active,
            backend=self.backend.name if active else "none",
            refusals=refusals,
            patches=activation.patch_states(),
            compilations=self.counters.compilations,
            recordings=self.counters.recordings,
            recording_limit=self.backend.most_recordings(self.settings),
            replays=self.counters.replays,
            recoveries=self.counters.recoveries,
            failures=tuple(self.counters.failures),
            cache_mib=self.backend.nbytes(self.kv) / _MIB,
            graph_mib=probes.graph_bytes(self.device) / _MIB,
            last_call=self.last_call,
        )


def attach(engine: Any) -> Attachment:
    """The attachment of an engine, made if it has none.

    Args:
        engine: a `DeepSpeedHybridEngine`, constructed.
    """
    known = of_engine(engine)
    if known is not None:
        return known
    attachment = Attachment(engine)
    engine.__dict__[_ATTRIBUTE] = attachment
    if attachment.model is not None:
        _by_model[attachment.model] = weakref.ref(attachment)
    _live.add(attachment)
    _say_what_construction_refuses(attachment)
    return attachment


def _say_what_construction_refuses(attachment: Attachment) -> None:
    from hepatch.guards import CONSTRUCTION

    for refusal in judge(attachment.facts(None)):
        if refusal.rule in CONSTRUCTION:
            attachment._said.warn(refusal.rule, refusal_line(attachment.name, refusal))


def of_engine(engine: Any) -> Attachment | None:
    """The attachment of an engine, or None."""
    # Not getattr: DeepSpeed's engine answers for attributes of its module.
    found: Attachment | None = engine.__dict__.get(_ATTRIBUTE)
    return found


def of_model(model: Any) -> Attachment | None:
    """The attachment that serves this very model, or None. A deep copy of the model has none."""
    reference = _by_model.get(model)
    return None if reference is None else reference()


def live() -> list[Attachment]:
    """Attachments of engines that still exist."""
    return list(_live)


def forget(attachment: Attachment) -> None:
    """Ends an attachment: its engine is served no more until it is attached anew."""
    attachment.drop_regions()
    if attachment.model is not None:
        _by_model.pop(attachment.model, None)
    engine = attachment._engine()
    if engine is not None:
        engine.__dict__.pop(_ATTRIBUTE, None)
    _live.discard(attachment)
