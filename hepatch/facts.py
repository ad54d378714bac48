"""What the rules of `guards.py` know and what they answer: plain values, without torch or DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""Nothing was compiled yet, so there is no dtype to compare with; None is a dtype's absence: no autocast."""


@dataclass(frozen=True)
class Call:
    """One generate as the rules see it.

    Attributes:
        training: whether the model is in training mode.
        total_tokens: columns of the prompt and the new tokens together, at the most this call may reach.
        unsupported: why this is no plain decode step, one phrase a reason: "beam search (num_beams=3)".
        rows: rows of the batch.
        prompt_tokens: columns of the prompt.
    """

    training: bool
    total_tokens: int
    unsupported: tuple[str, ...] = ()
    rows: int = 1
    prompt_tokens: int = 2


@dataclass(frozen=True)
class Facts:
    """What is known about process, engine and call; each default means that nothing is wrong.

    Attributes:
        enabled: hepatch is switched on.
        requested: what the ds_config asks; None where it says nothing.
        zero_stage: the engine's ZeRO stage.
        release_inference_cache: the ds_config's `release_inference_cache`.
        workspace_released: DeepSpeed's inference workspace is released at this moment.
        inference_tp_size: the ds_config's `inference_tp_size`.
        containers: DeepSpeed containers that stand in for layers of the model.
        causal_lm: there is a GenerationMixin inside `engine.module`.
        model_name: class name of the model, for the messages.
        static_cache: why this model, by its name, cannot decode over a static cache; None where it can.
        no_kernels: why this engine has no DeepSpeed containers of ours although they were asked for; None where it has,
            or nobody asked.
        max_out_tokens: positions of DeepSpeed's workspace; None where the model runs its own layers.
        workspace: why the workspace cannot hold the call's rows; None where it can.
        unseen_weight: a weight of the model that its containers do not read; None where they read all.
        hooks: forward hooks on modules of the model that are not DeepSpeed's, one phrase each.
        max_positions: positions that the model knows; None where it has no limit.
        weights_offloaded: `engine.offload_states` is in force.
        compiler_missing: why Inductor cannot build code here; None where it can.
        thread: identifier of the calling thread.
        region_thread: identifier of the thread that compiled; None before that.
        autocast: dtype name of the autocast in force; None without one.
        region_autocast: the same at the time of compiling; `UNSET` before that.
        failure: the failure that has switched this engine to eager; None without one.
        cache_mib_needed: size of the KV cache that this call needs, in MiB.
        cache_mib_budget: the user's limit for it, in MiB; None without one.
        call: the call; None where only the engine is asked about.
    """

    enabled: bool = True
    requested: bool | None = None
    zero_stage: int = 0
    release_inference_cache: bool = False
    workspace_released: bool = False
    inference_tp_size: int = 1
    containers: int = 0
    causal_lm: bool = True
    model_name: str = ""
    static_cache: str | None = None
    no_kernels: str | None = None
    max_out_tokens: int | None = None
    workspace: str | None = None
    unseen_weight: str | None = None
    hooks: tuple[str, ...] = ()
    max_positions: int | None = None
    weights_offloaded: bool = False
    compiler_missing: str | None = None
    thread: int = 0
    region_thread: int | None = None
    autocast: str | None = None
    region_autocast: str | Unset | None = UNSET
    failure: str | None = None
    cache_mib_needed: int = 0
    cache_mib_budget: int | None = None
    call: Call | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a call, or every call of an engine, stays eager, and what the user can do about it."""

    rule: str
    reason: str
    remedy: str
