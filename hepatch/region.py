"""A region: one whole decode step for the batch, compiled once, recorded once for each key.

The key is (rows, window): how many rows run and how many KV positions are read. It reaches the graph as two symbolic
sizes, those of the buffers' current faces, so that there is one compilation for all keys and CUDA graph trees record
one graph for each. A *position* is the 0-based index of the token that a step reads; the step itself finds it in a
device tensor.

Every region compiles a code object of its own, as Dynamo's cache and its recompile limit belong to the code object.

Source: ``torch.compile(mode="reduce-overhead")``; CUDA graph trees run a key eagerly on its first visit, record on its
second and replay from the third (``torch._inductor.cudagraph_trees``); with ``triton.skip_cudagraph_warmup`` they
record on the first.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config
from torch.nn.attention import sdpa_kernel

from hepatch import probes
from hepatch.backends.layers import EXACT_ATTENTION
from hepatch.sampling import Chooser
from hepatch.static_buffer import make_static

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hepatch.backends import KV, Decoder, Forward
    from hepatch.region_store import RegionKey
    from hepatch.report import Counters
    from hepatch.sampling import Request
    from hepatch.step_state import StepState

_serial = itertools.count()
# On the second visit at the latest a key is recorded; else Inductor skipped graphs.
_VISITS_BEFORE_REPLAY = 2
# A step over exact positions has sizes of the window, one less, and two less.
_SIZES_OF_A_WINDOW = 2


class GraphsSkipped(RuntimeError):  # noqa: N818 - no error of the step, whose outcome is right
    """Inductor compiled the step but gave up CUDA graphs for it."""


class Region:
    """The compiled decode step of one engine for one selection.

    Args:
        forward: how the model's forward is expressed.
        kv: its KV cache.
        state: the batch's buffers.
        request: the first call; its selection is baked in.
        counters: the engine's counters.
        backend: a `torch.compile` backend; with "inductor" the mode is reduce-overhead.
    """

    def __init__(
        self,
        forward: Forward,
        kv: KV,
        state: StepState,
        request: Request,
        counters: Counters,
        backend: str,
    ) -> None:
        self.chooser = Chooser(request, state.device)
        for buffer in self.chooser.static_buffers():
            make_static(buffer)
        self.state = state
        self.visits: Counter[RegionKey] = Counter()
        self.is_full: Callable[[], bool] = lambda: False
        self._known: set[RegionKey] = set()
        self._records_at_once = forward.records_at_once
        self._kv = kv
        self._decoder: Decoder = forward.decoder(kv, state)
        self._key: RegionKey | None = None
        self._host_key: RegionKey | None = None
        self._signature: int | None = None
        self._ran = False
        self._relocations = state.relocations
        self._addresses = state.addresses
        self.thread = threading.get_ident()
        self.autocast = probes.autocast_dtype(state.device)
        self._counters = counters
        self._graphed = backend == "inductor" and state.device.type == "cuda"
        exact = request.selection.deterministic and state.device.type == "cuda"
        self._decoder.compile(backend, exact)
        self._plain_step = _step_of(state, self.chooser, self._decoder, exact)
        self.name = self._plain_step.__name__
        self._step = _compile(self._plain_step, backend)

    def refresh(self, idle_hooks: list[dict[int, Any]]) -> None:
        """Once a call, before its first step: notices what graphs cannot see, and has them recorded anew.

        The guards of the layers' compilation are evaluated here, because a replay runs no host code.
        """
        self._decoder.notice(idle_hooks)
        if self._signature is not None and self._signature != self._look():
            self._signature = None
            self.state.relocate()
        if (self._relocations, self._addresses) != (self.state.relocations, self.state.addresses):
            self._relocations, self._addresses = self.state.relocations, self.state.addresses
            # Warm already, but each key's next run has to be a recording.
            self.visits = Counter(dict.fromkeys(self.visits, 1))
            self._known.clear()
        # Faces may be turned by others between calls.
        self._key = None

    def put_back(self) -> None:
        """After an interrupt, at whatever place: the model is as it was at `refresh`."""
        self._decoder.put_back()

    def settle(self) -> None:
        """At the end of a call: takes note of what the recordings made in it have baked in."""
        if self._ran:
            self._signature = self._look()
        self._ran = False

    def _look(self) -> int | None:
        if self._host_key is None:
            return None
        self._turn(self._host_key)
        with self._decoder.held():
            return self._decoder.signature()

    def run(self, key: RegionKey) -> bool:
        """Runs one step for `key`; the outcome is in the state's buffers.

        Returns:
            Whether the region ran it. Else it ran as plain Python, with the same outcome: no further key is admitted,
            or nothing has been compiled yet and the key's two sizes could not be told apart.

        Raises:
            GraphsSkipped: the step ran and its outcome is right, but Inductor does not graph it.
            Exception: whatever the compiler or the device raises; the buffers are then in doubt.
        """
        state, counters = self.state, self._counters
        if key != self._key:
            self._turn(key)
        if key in self._known:
            with _replaying(self._records_at_once):
                self._call(key, replay=self._graphed)
            self.visits[key] += 1
            counters.region_steps += 1
            counters.replays += self._graphed
            return True
        if self._stays_plain(key):
            with self._decoder.held():
                self._decoder.begin(key.window, replay=False)
                self._plain_step()
                self._decoder.end(replay=False)
            return False
        first_visit_of_all = not self.visits
        visit = self.visits[key] + 1
        compiled, skipped = probes.compiled_graphs(), probes.skipped_graphs()
        recorded = probes.recorded_graphs(state.device)
        # Other rows are other kernels, which have to have run before they can be captured.
        at_once = self._records_at_once and any(key.rows == other.rows for other in self.visits)
        # Compiling and warming up may draw random numbers (benchmarks of kernels do);
        # only sampling may move the generators.
        with torch.random.fork_rng(devices=_generators(state.device)), _inductor_options(at_once):
            self._call(key, replay=False)
        self.visits[key] = visit
        counters.region_steps += 1
        # One whole step, however many graphs it is made of.
        counters.compilations += probes.compiled_graphs() > compiled
        counters.recordings += probes.recorded_graphs(state.device) - recorded
        if not self._graphed or probes.recorded_graphs(state.device) > recorded:
            self._known.add(key)
        if first_visit_of_all and probes.compiled_graphs() == compiled:
            raise GraphsSkipped("Dynamo ran the decode step without compiling it (is TORCHDYNAMO_DISABLE set?)")
        if self._graphed and probes.skipped_graphs() > skipped:
            raise GraphsSkipped("Inductor compiled the decode step but skipped CUDA graphs for it")
        if self._graphed and visit >= _VISITS_BEFORE_REPLAY and key not in self._known:
            raise GraphsSkipped("Inductor compiled the decode step but recorded no CUDA graph after its warm-up")
        return True

    def _stays_plain(self, key: RegionKey) -> bool:
        if key in self.visits or not self._records_at_once:
            return False
        # In a first compilation equal sizes become one symbol, and exact keys cannot be padded to part them.
        return self.is_full() or (not self.visits and 0 <= key.window - key.rows <= _SIZES_OF_A_WINDOW)

    def _call(self, key: RegionKey, *, replay: bool) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with self._decoder.held():
            self._decoder.begin(key.window, replay=replay)
            self._step()
            self._decoder.end(replay=replay)
        if self._decoder.take_ran():
            self._ran, self._host_key = True, key

    def _turn(self, key: RegionKey) -> None:
        self._kv.turn(*key)
        self.state.turn(*key)
        self._decoder.turn()
        self._key = key


def _generators(device: torch.device) -> list[int]:
    """Devices whose random state a compilation may move, beside the CPU's."""
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


@contextlib.contextmanager
def _replaying(recorded_at_once: bool) -> Iterator[None]:
    """Around a replay. A graph that was recorded without a warm-up would be warmed up now, were it not said again."""
    if not recorded_at_once:
        yield
        return
    # A patch of the configuration takes four times as long, at every token.
    options = torch._inductor.config.triton
    before, options.skip_cudagraph_warmup = options.skip_cudagraph_warmup, True
    try:
        yield
    finally:
        options.skip_cudagraph_warmup = before


def _inductor_options(at_once: bool) -> Any:
    """Lifts Inductor's warning past a handful of sizes, since here the region store bounds the number of keys.

    Args:
        at_once: record a key at its first visit, without a warm-up run.
    """
    return torch._inductor.config.patch(
        {"triton.cudagraph_dynamic_shape_warn_limit": None, "triton.skip_cudagraph_warmup": at_once}
    )


def _step_of(state: StepState, chooser: Chooser, decoder: Decoder, exact: bool) -> Callable[[], None]:
    """The step as a plain function with a code object of its own."""

    def decode_step() -> None:
        batch = state.tokens, state.mask.t(), state.row_positions
        if exact:
            with sdpa_kernel(EXACT_ATTENTION):
                last = decoder.step(*batch)
        else:
            last = decoder.step(*batch)
        # float32 before anything else, as transformers does.
        logits = last.float()
        scores = chooser.process(state.tokens_so_far(), logits)
        tokens, finished, broken = chooser.choose(scores, state.noise, state.finished)
        if state.logits is not None:
            state.logits.copy_(logits)
        if state.scores is not None:
            state.scores.copy_(scores)
        state.record(tokens, finished, broken)
        state.row_positions.add_(1)

    code = decode_step.__code__.replace(co_name=f"decode_step_{next(_serial)}")
    return FunctionType(code, decode_step.__globals__, code.co_name, decode_step.__defaults__, decode_step.__closure__)


def _compile(step: Callable[..., None], backend: str) -> Callable[..., Any]:
    if backend != "inductor":
        return torch.compile(step, fullgraph=True, backend=backend)
    return torch.compile(step, fullgraph=True, mode="reduce-overhead")
