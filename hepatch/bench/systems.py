"""The systems that are compared, each for a process of its own: `import hepatch` would change the others.

hepatch's code is in every one of these processes, because it measures them. Where it is not the system, `HEPATCH=0` is
set before anything is imported, and `System.build` makes sure that no attribute of DeepSpeed or transformers is ours.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from hepatch.bench.workload import (
    PAD,
    Batch,
    Workload,
    build_batch,
    build_model,
    engine_config,
    generate_arguments,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hepatch.report import LastCall


_FEW_TOKENS = 4


class NotServedError(RuntimeError):
    """A system cannot run this workload as it is meant to; the text is its row."""


def synchronize(device: str) -> None:
    """Waits for the device; nothing on a CPU."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


class System:
    """A model, the DeepSpeed engine that trains it, and one way to generate with it.

    Args:
        workload: what is run.
        device: "cuda" or "cpu".
        build_op: whether DeepSpeed's inference op may be built where stock asks for it.

    Attributes:
        name: key of `SYSTEMS`.
        title: what a reader sees.
        environment: variables of its process, set before anything is imported.
        columns: new tokens of the latest whole call.
        answer: what the latest iteration trained on, int64 `[rows, prompt + new]`.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    environment: ClassVar[Mapping[str, str]] = {"HEPATCH": "0"}
    hybrid: ClassVar[bool] = True
    section: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, workload: Workload, device: str, *, build_op: bool = False) -> None:
        self.workload, self.device, self.build_op = workload, device, build_op
        self.engine: Any = None
        self.batch: Batch
        self.answer: torch.Tensor
        self.initialize_s = 0.0
        self.columns = workload.new_tokens

    def build(self) -> None:
        """Makes the model and its engine, in eval mode; the time of `deepspeed.initialize` goes to `initialize_s`."""
        import deepspeed

        self.prepare(deepspeed)
        model = build_model(self.workload, self.device, torch_dtype(self.workload.dtype))
        started = time.perf_counter()
        config = engine_config(self.workload, hybrid=self.hybrid, **self.section)
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.engine.eval()
        synchronize(self.device)
        self.initialize_s = time.perf_counter() - started
        self.use(self.workload.batches[0])

    def prepare(self, deepspeed: Any) -> None:
        """What must happen between `import deepspeed` and `initialize`.

        On a CPU a communication op is left unbuilt. Unless asked otherwise, spares the nvcc build of an op that the
        constructor loads and, without containers, nothing uses.

        Source: deepspeed/runtime/hybrid_engine.py DeepSpeedHybridEngine.__init__ (`self.workspace = WorkspaceOp()`);
        a loaded op without the expected functions makes `WorkspaceOp` take its own fallbacks.
        """
        from hepatch import activation

        if activation.is_on():
            raise RuntimeError("hepatch is on in the process of a system that it must not touch")
        if self.device == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        elif not self.build_op:
            from deepspeed.ops.op_builder.builder import OpBuilder

            OpBuilder._loaded_ops["transformer_inference"] = SimpleNamespace()

    def require_op(self) -> None:
        """Raises NotServedError where containers were built whose op is not there: they would run on fallbacks."""
        if self.engine._inference_containers and not self.build_op:
            raise NotServedError("this DeepSpeed builds containers for this model; run again with --build-op")

    def use(self, rows: int, ends: Sequence[int] = ()) -> None:
        """Sets the batch of the calls that follow."""
        vocabulary = int(self.engine.module.config.get_text_config(decoder=True).vocab_size)
        self.batch = build_batch(self.workload, vocabulary, self.device, rows, ends=ends)

    def generate(self, batch: Batch, **arguments: Any) -> torch.Tensor:
        """Prompt and new tokens, int64 `[rows, prompt + new]`."""
        raise NotImplementedError

    def rollout(self, new_tokens: int | None = None) -> torch.Tensor:
        """One call of the timed workload, or a shorter one."""
        arguments = generate_arguments(new_tokens or self.workload.new_tokens, self.batch.ends)
        tokens = self.generate(self.batch, **arguments)
        if new_tokens is None:
            self.columns = tokens.shape[1] - self.batch.ids.shape[1]
        return tokens

    def kv_token_bytes(self) -> int:
        """Bytes that a token of one row takes in a KV cache of this model."""
        from hepatch import probes

        return probes.kv_bytes_per_token(self.engine.module, torch_dtype(self.workload.dtype))

    def cache_mib(self) -> float:
        """MiB of KV cache that a timed call holds; as many as it needs unless the system says otherwise."""
        tokens = self.batch.ids.shape[0] * (self.batch.ids.shape[1] + self.columns)
        return self.kv_token_bytes() * tokens / 2**20

    def note(self) -> str | None:
        """What a reader of this system's rows must know, None where there is nothing."""
        return None

    def fallbacks(self) -> list[str]:
        """Why calls left hepatch's region, one line a call; empty for other systems."""
        return []

    def train_step(self, sequences: torch.Tensor) -> float:
        """Forward, backward and optimizer step on `sequences`; returns the loss and leaves the engine in train mode."""
        import torch

        self.engine.train()
        loss = self.engine(input_ids=sequences, attention_mask=torch.ones_like(sequences), labels=sequences).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def iteration(self) -> dict[str, float]:
        """One RLHF-shaped iteration in ms: eval, generate, train, forward, backward, step; the parts and the whole."""
        synchronize(self.device)
        started = time.perf_counter()
        self.engine.eval()
        self.answer = self.rollout()
        synchronize(self.device)
        generated = time.perf_counter()
        loss = self.train_step(self.answer)
        synchronize(self.device)
        ended = time.perf_counter()
        return {
            "iteration_ms": (ended - started) * 1e3,
            "generate_ms": (generated - started) * 1e3,
            "train_ms": (ended - generated) * 1e3,
            "loss": loss,
        }

    def training(self) -> float:
        """ms of a training step on `answer`, after a generate of a few tokens: the step's state is an iteration's."""
        self.engine.eval()
        self.rollout(_FEW_TOKENS)
        synchronize(self.device)
        started = time.perf_counter()
        self.train_step(self.answer)
        synchronize(self.device)
        return (time.perf_counter() - started) * 1e3


class Unpatched(System):
    """The HybridEngine as shipped, by `engine.module.generate`: `engine.generate` raises without containers."""

    name = "unpatched"
    title = "DeepSpeed HybridEngine"
    _thawed = 0

    def build(self) -> None:
        """As the base class; raises NotServedError if containers were built, since then the op would be needed.

        With containers DeepSpeed freezes the language model head. It is thawed: a training step that leaves a part out
        is no measure for one that does not.
        """
        super().build()
        self.require_op()
        for weight in self.engine.module.parameters():
            self._thawed += not weight.requires_grad
            weight.requires_grad_(True)

    def generate(self, batch: Batch, **arguments: Any) -> torch.Tensor:
        """The model's own `generate`, eager; with containers DeepSpeed lets it lead to the engine's."""
        tokens: torch.Tensor = self.engine.module.generate(batch.ids, attention_mask=batch.mask, **arguments)
        return tokens

    def note(self) -> str | None:
        """Which layers ran, and what was made to train."""
        if not self.engine._inference_containers:
            return "no inference containers: the model's own layers"
        return f"{self._thawed} weights that DeepSpeed freezes were thawed" if self._thawed else None


class CudaGraph(Unpatched):
    """The HybridEngine with its own decode graphs, `hybrid_engine.enable_cuda_graph`."""

    name = "cuda-graph"
    title = "DeepSpeed enable_cuda_graph"
    section: ClassVar[Mapping[str, Any]] = {"enable_cuda_graph": True}

    def build(self) -> None:
        """As the base class; raises NotServedError where the flag has no effect: the row would be `unpatched` again."""
        super().build()
        if getattr(self.engine, "_decode_graphs", None) is None:
            why = "no inference containers are built for this model" if self.device != "cpu" else "there is no CUDA"
            raise NotServedError(f"no graphs are in force, {why}: the same as without the flag")

    def note(self) -> str | None:
        """How many graphs, or that the capture failed."""
        graphs = self.engine._decode_graphs
        if getattr(graphs, "_disabled", False):
            return "capture failed, fell back to eager"
        return f"{graphs.captured_positions} graphs"


class Rollout(System):
    """DeepSpeed's `HybridEngineRollout` with graph capture: greedy decoding over its own static cache."""

    name = "rollout"
    title = "DeepSpeed HybridEngineRollout"

    def build(self) -> None:
        """As the base class, then the rollout engine around the hybrid engine."""
        super().build()
        self.require_op()
        try:
            from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig
        except ImportError as error:
            raise NotServedError(f"this DeepSpeed has no HybridEngineRollout ({error})") from error
        self.tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=None)
        self.inner = HybridEngineRollout(
            self.engine, self.tokenizer, HybridEngineRolloutConfig(use_graph_capture=self.device != "cpu")
        )

    def generate(self, batch: Batch, **arguments: Any) -> torch.Tensor:
        """`HybridEngineRollout.generate`, which ignores `min_new_tokens`: without an end token it need not care."""
        from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

        if len(batch.ends) > 1:
            raise NotServedError("HybridEngineRollout ends rows at one token id, and this workload has several")
        self.tokenizer.eos_token_id = batch.ends[0] if batch.ends else None
        request = RolloutRequest(batch.ids, batch.mask)
        sampling = SamplingConfig(max_new_tokens=arguments["max_new_tokens"], temperature=0.0)
        tokens: torch.Tensor = self.inner.generate(request, sampling).input_ids
        return tokens

    def note(self) -> str | None:
        """What its calls contain."""
        return "captures anew in every call" if self.device != "cpu" else "no graph capture on a CPU: eager"


class StaticCache(System):
    """transformers' static cache with its own auto-compile.

    It runs on a plain model over the parameters of an ordinary engine: the engine's hooks sit on its root module and
    would break the compiled call.
    """

    name = "static-cache"
    title = "transformers static cache"
    hybrid = False

    def build(self) -> None:
        """As the base class, then the plain model over the same parameter objects, so that generate sees training."""
        import torch

        super().build()
        trained = self.engine.module
        with torch.device("meta"):
            plain = type(trained)(trained.config).to(trained.dtype)
        for name, parameter in trained.named_parameters(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(owner), attribute, parameter)
        for source, target in zip(trained.modules(), plain.modules(), strict=True):
            target._buffers.update(source._buffers)
            # Rotary embeddings keep a second copy of a buffer as a plain attribute.
            vars(target).update({key: value for key, value in vars(source).items() if isinstance(value, torch.Tensor)})
        self.plain = plain.eval()

    def generate(self, batch: Batch, **arguments: Any) -> torch.Tensor:
        """`generate(cache_implementation="static")`; the newer transformers compile the decode step, on a GPU only."""
        tokens: torch.Tensor = self.plain.generate(
            batch.ids, attention_mask=batch.mask, cache_implementation="static", **arguments
        )
        return tokens

    def note(self) -> str | None:
        """Whether anything was compiled; transformers decides that by device, model and cache."""
        from hepatch.bench import profiling

        return "compiled by transformers" if profiling.compile_s() > 0 else "transformers compiled nothing: eager"


class Native(System):
    """The HybridEngine under `import hepatch`, on the model's own layers; `engine.generate`."""

    name = "native"
    title = "hepatch native"
    environment: ClassVar[Mapping[str, str]] = {"HEPATCH": "1", "HEPATCH_BACKEND": "native"}

    def __init__(self, workload: Workload, device: str, *, build_op: bool = False) -> None:
        super().__init__(workload, device, build_op=build_op)
        self._fallbacks: list[str] = []

    def prepare(self, deepspeed: Any) -> None:
        """The one line that a user adds; the op is hepatch's affair."""
        import hepatch

        hepatch.enable()
        if self.device == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def build(self) -> None:
        """As the base class; raises NotServedError where hepatch says already now that it will serve no call."""
        super().build()
        _require_no_refusal(self.report())

    def generate(self, batch: Batch, **arguments: Any) -> torch.Tensor:
        """The engine's `generate`.

        Raises:
            NotServedError: a guard refused the call, so that no time of it would be hepatch's.
        """
        from hepatch import attachments

        tokens: torch.Tensor = self.engine.generate(batch.ids, attention_mask=batch.mask, **arguments)
        # Not the whole report: that looks the model and the allocator's blocks over, within what is timed.
        last = attachments.attach(self.engine).last_call
        wanted = arguments["max_new_tokens"] > 1
        if last is None or last.path == "eager" or (wanted and last.eager_steps > 1):
            _require_no_refusal(self.report())
            self._fallbacks.append("no call was seen" if last is None else _left(last))
        return tokens

    def report(self) -> dict[str, Any]:
        """What hepatch reports on this engine, as plain data."""
        data: dict[str, Any] = sys.modules["hepatch"].report(self.engine).to_dict()
        return data

    def cache_mib(self) -> float:
        """MiB of the KV cache that hepatch holds, spare rows and positions included."""
        return float(self.report()["cache_mib"])

    def note(self) -> str | None:
        """What served the calls."""
        report = self.report()
        return f"{report['backend']}: {report['compilations']} compilations, {report['recordings']} recordings"

    def fallbacks(self) -> list[str]:
        """As the base class."""
        return list(self._fallbacks)


def _require_no_refusal(report: Mapping[str, Any]) -> None:
    if report["refusals"]:
        refused = "; ".join(f"[{refusal['rule']}] {refusal['reason']}" for refusal in report["refusals"])
        raise NotServedError(f"refused: {refused}")


def _left(last: LastCall) -> str:
    """How a call left its region."""
    if last.path == "eager":
        return f"eager: {last.reason}"
    return f"{last.eager_steps - 1} of its steps ran outside the region"


class Kernels(Native):
    """The same on DeepSpeed's inference containers."""

    name = "kernels"
    title = "hepatch kernels"
    environment: ClassVar[Mapping[str, str]] = {"HEPATCH": "1", "HEPATCH_BACKEND": "kernels"}


SYSTEMS: dict[str, type[System]] = {
    system.name: system for system in (Unpatched, CudaGraph, Rollout, StaticCache, Kernels, Native)
}
"""Every system by name, in the order of a table."""

OURS = (Kernels.name, Native.name)
"""The systems that are hepatch."""
