"""The three systems that are compared, each for a process of its own: `import hepatch` would change the others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Workload, build_model, build_prompts, engine_config, generate_arguments

if TYPE_CHECKING:
    import torch


def synchronize(device: str) -> None:
    """Waits for the device; nothing on a CPU."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


class System:
    """A model, the DeepSpeed engine that trains it, and one way to generate with it."""

    name = ""
    hybrid = True

    def __init__(self, workload: Workload, device: str, *, build_op: bool = False) -> None:
        self.workload, self.device, self.build_op = workload, device, build_op
        self.prompts = build_prompts(workload, device)
        self.engine: Any = None
        self.initialize_s = 0.0

    def build(self) -> None:
        """Makes the model and its engine, in eval mode; the time of `deepspeed.initialize` goes to `initialize_s`."""
        import deepspeed
        import torch

        self.prepare(deepspeed)
        model = build_model(self.workload, self.device, torch.float32 if self.device == "cpu" else torch.float16)
        started = time.perf_counter()
        config = engine_config(self.workload, self.device, hybrid=self.hybrid)
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.engine.eval()
        synchronize(self.device)
        self.initialize_s = time.perf_counter() - started

    def prepare(self, deepspeed: Any) -> None:
        """What must happen between `import deepspeed` and `initialize`; on a CPU a communication op is left unbuilt."""
        if self.device == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def generate(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Prompt and new tokens, int64 `[batch, prompt + new]`."""
        raise NotImplementedError

    def rollout(self, new_tokens: int | None = None) -> torch.Tensor:
        """One call of the timed workload."""
        return self.generate(self.prompts, **generate_arguments(new_tokens or self.workload.new_tokens))

    def cache_mib(self) -> float:
        """MiB of KV cache that a timed call holds; as many as it needs unless the system says otherwise."""
        return self.workload.kv_mib

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
        sequences = self.rollout()
        synchronize(self.device)
        generated = time.perf_counter()
        loss = self.train_step(sequences)
        synchronize(self.device)
        ended = time.perf_counter()
        return {
            "iteration_ms": (ended - started) * 1e3,
            "generate_ms": (generated - started) * 1e3,
            "train_ms": (ended - generated) * 1e3,
            "loss": loss,
        }


class Unpatched(System):
    """The HybridEngine as shipped, by `engine.module.generate`: `engine.generate` raises without containers."""

    name = "unpatched"

    def prepare(self, deepspeed: Any) -> None:
        """Unless asked otherwise, spares the nvcc build of an op that the constructor loads and no container uses here.

        Source: deepspeed/runtime/hybrid_engine.py DeepSpeedHybridEngine.__init__ (`self.workspace = WorkspaceOp()`);
        a loaded op without the expected functions makes `WorkspaceOp` take its own fallbacks.
        """
        super().prepare(deepspeed)
        if not self.build_op and self.device != "cpu":
            from deepspeed.ops.op_builder.builder import OpBuilder

            OpBuilder._loaded_ops["transformer_inference"] = SimpleNamespace()

    def build(self) -> None:
        """As the base class; raises RuntimeError if containers were built, since then the op would be needed."""
        super().build()
        if self.engine._inference_containers and not self.build_op:
            raise RuntimeError("this DeepSpeed builds containers for OPT; run again with --build-op")

    def generate(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The model's own `generate`, eager."""
        import torch

        tokens: torch.Tensor = self.engine.module.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        return tokens


class StaticCache(System):
    """transformers' static cache with its own auto-compile.

    It runs on a plain model over the parameters of an ordinary ZeRO-2 engine: the engine's hooks sit on its root module
    and would break the compiled call.
    """

    name = "static-cache"
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
        if any(buffer.is_meta for buffer in (*plain.parameters(), *plain.buffers())):
            raise RuntimeError("the plain model has tensors that the trained one lacks")
        self.plain = plain.eval()

    def generate(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """`generate(cache_implementation="static")`; transformers compiles the decode step on a GPU only."""
        import torch

        mask = torch.ones_like(ids)
        tokens: torch.Tensor = self.plain.generate(ids, attention_mask=mask, cache_implementation="static", **arguments)
        return tokens


class Hepatch(System):
    """The HybridEngine under `import hepatch`; `engine.generate`."""

    name = "hepatch"

    def prepare(self, deepspeed: Any) -> None:
        """The one line that a user adds."""
        super().prepare(deepspeed)
        import hepatch

        self.hepatch = hepatch

    def generate(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The engine's `generate`; a call that left the region raises, so that no eager step is ever timed."""
        import torch

        tokens: torch.Tensor = self.engine.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        last = self.report()["last_call"]
        if last is None or last["path"] != "fused" or last["eager_steps"] > 1:
            raise RuntimeError(f"a call was not fused: {last}; {self.hepatch.report(self.engine)}")
        return tokens

    def report(self) -> dict[str, Any]:
        """What hepatch reports on this engine, as plain data."""
        data: dict[str, Any] = self.hepatch.report(self.engine).to_dict()
        return data

    def cache_mib(self) -> float:
        """MiB of the static cache that hepatch holds, spare rows and positions included."""
        return float(self.report()["cache_mib"])


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Unpatched, StaticCache, Hepatch)}
