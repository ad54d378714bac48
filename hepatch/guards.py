"""The named rules by which a call stays eager: facts in, refusals out.

Pure: no torch, no DeepSpeed, no environment. Everything a rule knows stands in `Facts`, taken once at the start of a
call, so the rules cannot change their mind between two tokens. `judge` tries every rule and returns all that fail,
because a reader who cures one wants to know about the next. A rule's name is stable for ever: it stands in logs,
reports, the README and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from hepatch.facts import UNSET, Call, Facts, Refusal, Unset

__all__ = ["CONSTRUCTION", "GUARDS", "UNSET", "Call", "Facts", "Guard", "Refusal", "Unset", "judge"]


ZERO_STAGE_OF_WEIGHTS: Final = 3
"""The ZeRO stage that partitions the weights themselves."""


@dataclass(frozen=True)
class Guard:
    """One rule.

    Attributes:
        rule: its name in kebab-case.
        scope: what a refusal holds for.
        refuses: the reason for a refusal, None where the rule has nothing against it.
        remedy: what the user can change.
        source: the upstream file and symbol that the rule rests on.
    """

    rule: str
    scope: Literal["process", "engine", "call"]
    refuses: Callable[[Facts], str | None]
    remedy: str | Callable[[Facts], str]
    source: str

    def judge(self, facts: Facts) -> Refusal | None:
        """The refusal of this rule, None where it does not object."""
        reason = self.refuses(facts)
        if reason is None:
            return None
        return Refusal(self.rule, reason, self.remedy if isinstance(self.remedy, str) else self.remedy(facts))


def judge(facts: Facts) -> tuple[Refusal, ...]:
    """Every refusal, in the order of `GUARDS`; empty where the call may use a region."""
    return tuple(refusal for guard in GUARDS if (refusal := guard.judge(facts)) is not None)


def _disabled(facts: Facts) -> str | None:
    if not facts.enabled:
        return "hepatch is switched off"
    return "the ds_config asks for no graph capture" if facts.requested is False else None


def _enable(facts: Facts) -> str:
    if not facts.enabled:
        return "Unset HEPATCH or set it to 1, and call hepatch.enable() if hepatch.disable() was called"
    return "Drop enable_graph_capture and enable_cuda_graph from the hybrid_engine section, or set the first to true"


def _released_cache(facts: Facts) -> str | None:
    if facts.release_inference_cache:
        return "release_inference_cache frees the inference buffers between generates"
    return "DeepSpeed's inference workspace is released" if facts.workspace_released else None


def _retake(facts: Facts) -> str:
    if facts.release_inference_cache:
        return "Drop release_inference_cache from the ds_config; hepatch.release(engine) frees memory when asked"
    return "Call engine.eval() before generate"


def _thread(facts: Facts) -> str | None:
    if facts.region_thread is None or facts.region_thread == facts.thread:
        return None
    return f"graphs belong to the thread that compiled them, {facts.region_thread}, and this is {facts.thread}"


def _autocast(facts: Facts) -> str | None:
    if facts.region_autocast is UNSET or facts.region_autocast == facts.autocast:
        return None
    return f"compiled with autocast {facts.region_autocast or 'off'}, called with autocast {facts.autocast or 'off'}"


def _cache_budget(facts: Facts) -> str | None:
    if facts.cache_mib_budget is None or facts.cache_mib_needed <= facts.cache_mib_budget:
        return None
    return f"the KV cache needs {facts.cache_mib_needed} MiB and {facts.cache_mib_budget} MiB are allowed"


def _length(facts: Facts) -> str | None:
    if facts.call is None:
        return None
    total = facts.call.total_tokens
    if facts.max_positions is not None and total > facts.max_positions:
        return f"prompt and new tokens come to {total} and the model has {facts.max_positions} positions"
    # The last token is never run through the model.
    if facts.max_out_tokens is not None and total - 1 > facts.max_out_tokens:
        return f"prompt and new tokens come to {total} and DeepSpeed's workspace has {facts.max_out_tokens} positions"
    return None


def _shorten(facts: Facts) -> str:
    if facts.max_out_tokens is not None and facts.max_out_tokens < (facts.max_positions or facts.max_out_tokens + 1):
        return "Raise max_out_tokens in the hybrid_engine section, or lower max_new_tokens"
    return "Shorten the prompt or lower max_new_tokens"


def _decode_mode(facts: Facts) -> str | None:
    if facts.call is None:
        return None
    causes = (("the model is in training mode",) if facts.call.training else ()) + facts.call.unsupported
    if facts.max_out_tokens is not None and facts.call.prompt_tokens == 1:
        causes += ("a prompt of one token, which DeepSpeed's kernels take for a decode step",)
    return f"not a plain decode step: {', '.join(causes)}" if causes else None


def _plain_decode(facts: Facts) -> str:
    if facts.call is not None and facts.call.training:
        return "Call engine.eval() before generate"
    return "Leave it out to use the region; the tokens are transformers' own either way"


GUARDS: Final[tuple[Guard, ...]] = (
    Guard(
        "disabled",
        "process",
        _disabled,
        _enable,
        "deepspeed/runtime/config.py: HybridEngineConfig",
    ),
    Guard(
        "backend",
        "engine",
        lambda facts: None if facts.no_kernels is None else f"HEPATCH_BACKEND=kernels, but {facts.no_kernels}",
        "Set HEPATCH_BACKEND=auto",
        "hepatch/settings.py: Settings.backend",
    ),
    Guard(
        "model",
        "engine",
        lambda facts: None if facts.causal_lm else f"no model with generate inside {facts.model_name or 'the module'}",
        "Give deepspeed.initialize a causal language model of transformers",
        "transformers/generation/utils.py: GenerationMixin._sample",
    ),
    Guard(
        "containers",
        "engine",
        lambda facts: (
            f"built before hepatch was on, with {facts.containers} DeepSpeed containers" if facts.containers else None
        ),
        "Import hepatch before deepspeed.initialize",
        "deepspeed/runtime/hybrid_engine.py: DeepSpeedHybridEngine.populate_all_inference_policies",
    ),
    Guard(
        "zero3",
        "engine",
        lambda facts: (
            "ZeRO stage 3 gathers the weights into fresh memory each time"
            if facts.zero_stage >= ZERO_STAGE_OF_WEIGHTS
            else None
        ),
        "Use ZeRO stage 2 or lower",
        "deepspeed/runtime/hybrid_engine.py: DeepSpeedHybridEngine.generate (GatheredParameters)",
    ),
    Guard(
        "released-cache",
        "engine",
        _released_cache,
        _retake,
        "deepspeed/runtime/hybrid_engine.py: DeepSpeedHybridEngine.generate (release_workspace)",
    ),
    Guard(
        "tensor-parallel",
        "engine",
        lambda facts: "collectives inside a region are not verified" if facts.inference_tp_size > 1 else None,
        "Set inference_tp_size to 1",
        "deepspeed/runtime/hybrid_engine.py: DeepSpeedHybridEngine.create_inference_module",
    ),
    Guard(
        "static-cache",
        "engine",
        lambda facts: facts.static_cache,
        "None for this model; it generates eagerly",
        "transformers/modeling_utils.py: PreTrainedModel._can_compile_fullgraph",
    ),
    Guard(
        "weights",
        "engine",
        lambda facts: (
            f"DeepSpeed's containers do not read the model's {facts.unseen_weight}, which was replaced or converted"
            if facts.unseen_weight
            else None
        ),
        "Change weights in place, or build the engine after they were replaced",
        "deepspeed/module_inject/containers/features/hybrid_engine.py: HybridEngineContainer.set_params_wo_copy",
    ),
    Guard(
        "workspace",
        "call",
        lambda facts: facts.workspace,
        "Generate fewer rows at a time, lower max_out_tokens, or free device memory",
        "deepspeed/ops/csrc/transformer/inference/includes/inference_context.h: InferenceContext::GenWorkSpace",
    ),
    Guard(
        "hooks",
        "engine",
        lambda facts: f"a compiled step would not call {', '.join(facts.hooks)}" if facts.hooks else None,
        "Remove the hooks before generate",
        "torch/nn/modules/module.py: Module.register_forward_hook",
    ),
    Guard(
        "weights-offloaded",
        "engine",
        lambda facts: "offload_states has moved the weights off the device" if facts.weights_offloaded else None,
        "Call engine.reload_states() before generate",
        "deepspeed/runtime/engine.py: DeepSpeedEngine.offload_states",
    ),
    Guard(
        "no-compiler",
        "process",
        lambda facts: facts.compiler_missing,
        "Install it, or name another in CXX (CPU) or CC (GPU)",
        "torch/_inductor/cpp_builder.py: get_cpp_compiler",
    ),
    Guard(
        "thread",
        "call",
        _thread,
        "Generate from one thread, or call hepatch.release(engine) before another takes over",
        "torch/_inductor/cudagraph_trees.py: get_container",
    ),
    Guard(
        "autocast",
        "call",
        _autocast,
        "Generate under the same autocast each time, or call hepatch.release(engine) before a change",
        "torch/_dynamo/guards.py: GlobalStateGuard",
    ),
    Guard(
        "earlier-failure",
        "engine",
        lambda facts: None if facts.failure is None else f"an earlier call failed in its region: {facts.failure}",
        "Call hepatch.reset(engine) to try again",
        "hepatch/recovery.py",
    ),
    Guard(
        "cache-budget",
        "call",
        _cache_budget,
        "Raise HEPATCH_CACHE_MIB, or generate fewer rows or tokens at a time",
        "hepatch/settings.py: Settings.cache_mib",
    ),
    Guard(
        "length",
        "call",
        _length,
        _shorten,
        "transformers/configuration_utils.py: PreTrainedConfig.max_position_embeddings",
    ),
    Guard(
        "decode-mode",
        "call",
        _decode_mode,
        _plain_decode,
        "transformers/generation/utils.py: GenerationMixin._sample",
    ),
)
"""Every rule, in the order in which a report lists them."""

CONSTRUCTION: Final = frozenset(
    {"disabled", "backend", "model", "containers", "zero3", "released-cache", "tensor-parallel"}
)
"""Rules whose facts are fixed when an engine is built; `disabled` so far as the ds_config says it."""
