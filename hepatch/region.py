"""A region: one whole decode step for the batch, compiled once, recorded once for each key.

The key is (live rows, window): how many rows run and how many KV positions are read. It reaches the graph as two symbolic sizes,
those of two read-only index tensors, so that there is one compilation for all keys and CUDA graph trees record one graph for
each. A *position* is the 0-based index of the token that a step reads; the step itself finds it in a device tensor.

Every region compiles a code object of its own, because Dynamo's cache and its recompile limit belong to the code object.

Source: ``torch.compile(mode="reduce-overhead")``; CUDA graph trees run a key eagerly on its first visit, record on its second and
replay from the third (``torch._inductor.cudagraph_trees``).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from hepatch import probes
from hepatch.backends.native import StepView
from hepatch.backends.static_kv import make_static
from hepatch.sampling import Chooser

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.backends.native import NativeForward
    from hepatch.backends.static_kv import StaticKV
    from hepatch.report import Counters
    from hepatch.sampling import Request
    from hepatch.step_state import StepState

_serial = itertools.count()
# On the second visit a key is recorded; a third visit without a recording means that Inductor skipped graphs.
_VISITS_BEFORE_REPLAY = 2
# cuDNN's attention, which torch prefers for a masked step, differs from run to run; these two do not.
_EXACT_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class GraphsSkipped(RuntimeError):
    """Inductor compiled the step but gave up CUDA graphs for it."""


@dataclass(frozen=True)
class RegionKey:
    """What a recording is made for.

    Args:
        rows: live rows of the batch, at least 2.
        window: KV positions that are read, a multiple of the bucket.
        allocated: rows and positions of the buffers; growth makes new keys.
    """

    rows: int
    window: int
    allocated: tuple[int, int]

    def covers(self, rows: int, window: int) -> bool:
        """Whether a step of this many rows and positions may be padded up to this key."""
        return self.rows >= rows and self.window >= window


class Region:
    """The compiled decode step of one engine for one selection.

    Args:
        forward: the model's forward over the static cache.
        kv: the static cache.
        state: the batch's buffers.
        request: the first call; its selection is baked in.
        counters: the engine's counters.
        backend: a `torch.compile` backend; with "inductor" the mode is reduce-overhead.
    """

    def __init__(
        self,
        forward: NativeForward,
        kv: StaticKV,
        state: StepState,
        request: Request,
        counters: Counters,
        backend: str,
    ) -> None:
        self.chooser = Chooser(request, state.device)
        for buffer in self.chooser.static_buffers():
            torch._dynamo.mark_static_address(buffer, guard=False)
        self.state = state
        self.visits: Counter[RegionKey] = Counter()
        self._keys: dict[RegionKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self.thread = threading.get_ident()
        self.autocast = probes.autocast_dtype(state.device)
        self._counters = counters
        self._graphed = backend == "inductor" and state.device.type == "cuda"
        self._step = _compile(_step_of(self, forward, kv), backend)

    @property
    def compiled(self) -> bool:
        """Whether the step has been compiled by a first visit."""
        return bool(self.visits)

    def run(self, key: RegionKey) -> None:
        """Runs one step for `key`; the outcome is in the state's buffers.

        Raises:
            GraphsSkipped: the step ran and its outcome is right, but Inductor does not graph it.
            Exception: whatever the compiler or the device raises; the buffers are then in doubt.
        """
        state, counters = self.state, self._counters
        first_visit_of_all = not self.visits
        visit = self.visits[key] = self.visits[key] + 1
        rows, window = self._indices(key)
        if visit > _VISITS_BEFORE_REPLAY:
            torch.compiler.cudagraph_mark_step_begin()
            self._step(rows, window)
            counters.region_steps += 1
            counters.replays += self._graphed
            return
        compiled, skipped = probes.compiled_graphs(), probes.skipped_graphs()
        recorded = probes.recorded_graphs(state.device)
        # Compiling and warming up may draw random numbers (benchmarks of kernels do); only sampling may move the generators.
        with torch.random.fork_rng(devices=_generators(state.device)), _without_size_warning():
            torch.compiler.cudagraph_mark_step_begin()
            self._step(rows, window)
        counters.region_steps += 1
        counters.compilations += probes.compiled_graphs() - compiled
        counters.recordings += probes.recorded_graphs(state.device) - recorded
        if first_visit_of_all and probes.compiled_graphs() == compiled:
            raise GraphsSkipped("Dynamo ran the decode step without compiling it (is TORCHDYNAMO_DISABLE set?)")
        if self._graphed and probes.skipped_graphs() > skipped:
            raise GraphsSkipped("Inductor compiled the decode step but skipped CUDA graphs for it")
        if self._graphed and visit == _VISITS_BEFORE_REPLAY and probes.recorded_graphs(state.device) == recorded:
            raise GraphsSkipped("Inductor compiled the decode step but recorded no CUDA graph after its warm-up")


    def _indices(self, key: RegionKey) -> tuple[torch.Tensor, torch.Tensor]:
        """The two index tensors whose sizes are the key; the same objects at every visit."""
        known = self._keys.get(key)
        if known is None:
            pair = self.state.row_index[: key.rows], self.state.position_index[: key.window]
            known = self._keys[key] = (make_static(pair[0], (0,)), make_static(pair[1], (0,)))
        return known


def _generators(device: torch.device) -> list[int]:
    """Devices whose random state a compilation may move, beside the CPU's."""
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _without_size_warning() -> Any:
    """Lifts Inductor's warning past a handful of sizes: here the region store bounds the number of keys."""
    return torch._inductor.config.patch({"triton.cudagraph_dynamic_shape_warn_limit": None})


def _step_of(region: Region, forward: NativeForward, kv: StaticKV) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The step as a plain function with a code object of its own."""
    state, chooser = region.state, region.chooser
    selection = chooser.selection
    view = StepView()
    cache = forward.decode_cache(kv, view)
    exact = selection.deterministic and state.device.type == "cuda"

    def decode_step(rows: torch.Tensor, window: torch.Tensor) -> None:
        live, read = rows.shape[0], window.shape[0]
        view.rows, view.window, view.position = rows, read, state.position
        batch = state.tokens[:live], state.mask[:live, :read], state.row_positions[:live]
        if exact:
            with sdpa_kernel(_EXACT_ATTENTION):
                last = forward.decode(cache, view, *batch)
        else:
            last = forward.decode(cache, view, *batch)
        # float32 before anything else, as transformers does.
        logits = last.float()
        scores = chooser.process(state.ids[:live, :read], state.position[0] + 1, logits)
        noise = None if state.noise is None or not selection.do_sample else state.noise[:live]
        tokens, finished, broken = chooser.choose(scores, noise, state.finished[:live])
        if selection.logits:
            state.logits.index_copy_(0, rows, logits)
        if selection.scores:
            state.scores.index_copy_(0, rows, scores)
        state.record(rows, tokens, finished, broken)
        state.row_positions.add_(1)

    code = decode_step.__code__.replace(co_name=f"decode_step_{next(_serial)}")
    return FunctionType(code, decode_step.__globals__, code.co_name, decode_step.__defaults__, decode_step.__closure__)


def _compile(step: Callable[..., None], backend: str) -> Callable[..., Any]:
    if backend != "inductor":
        return torch.compile(step, fullgraph=True, backend=backend)
    return torch.compile(step, fullgraph=True, mode="reduce-overhead")
