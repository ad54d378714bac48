"""One call of transformers' sampling loop, read: what it asks, and why it may be no plain decode.

Source: ``GenerationMixin._sample`` takes input_ids, logits_processor, stopping_criteria, generation_config,
synced_gpus, streamer and model kwargs (transformers 4.48 to 5.24); ``generate`` has prepared all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hepatch import probes, sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STOPPING_MODULE = "transformers.generation.stopping_criteria"
# Model arguments that a region hands over, or that change nothing in what it computes.
HANDLED = (
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "num_logits_to_keep",
    "cache_position",
    *probes.CACHE_KEYWORDS,
)


@dataclass(frozen=True)
class Prompt:
    """What a prefill is given.

    Attributes:
        ids: int64 `[batch, prompt]`.
        mask: int64 `[batch, prompt]`, or None where nothing is padded.
        positions: int64 `[batch, prompt]`.
        model_kwargs: everything for the model's forward, as transformers prepared it.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateCall:
    """The arguments of one `_sample`, by name, and what follows from them.

    Attributes:
        input_ids: int64 `[batch, prompt]`, where the caller has it.
        processors: transformers' `LogitsProcessorList`, prepared.
        criteria: transformers' `StoppingCriteriaList`, prepared.
        config: the prepared `GenerationConfig`.
        streamer: where tokens go as they come, or None.
        model_kwargs: everything for the model's forward.
        extra: further named arguments of `_sample`.
        max_length: prompt and new tokens together at which the call ends.
        request: how tokens are selected, or None where a region cannot express it.
        unsupported: why this is no plain decode, one phrase a reason.
    """

    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    model_kwargs: Mapping[str, Any]
    extra: Mapping[str, Any]
    max_length: int
    request: sampling.Request | None
    unsupported: tuple[str, ...]

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.input_ids.shape[0])

    @property
    def prompt(self) -> int:
        """Columns of the prompt."""
        return int(self.input_ids.shape[1])

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """int64 `[batch, prompt]`, or None where nothing is padded."""
        mask: torch.Tensor | None = self.model_kwargs.get("attention_mask")
        return mask

    @property
    def cache(self) -> Any | None:
        """The KV cache that transformers prepared, or the caller's own."""
        for keyword in probes.CACHE_KEYWORDS:
            if self.model_kwargs.get(keyword) is not None:
                return self.model_kwargs[keyword]
        return None

    @property
    def wants_dict(self) -> bool:
        """Whether a `GenerateDecoderOnlyOutput` is to be returned."""
        return bool(self.config.return_dict_in_generate)

    def prompt_on(self, device: torch.device) -> Prompt:
        """The prompt, its tensors where the model is."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        kwargs = {**self.model_kwargs, **({} if mask is None else {"attention_mask": mask})}
        return Prompt(self.input_ids.to(device), mask, self.positions().to(device), kwargs)

    def positions(self) -> torch.Tensor:
        """int64 `[batch, prompt]`: the positions transformers would use."""
        given: torch.Tensor | None = self.model_kwargs.get("position_ids")
        if given is not None:
            return given
        if self.attention_mask is None:
            return torch.arange(self.prompt, device=self.input_ids.device).expand(self.batch, self.prompt)
        return (self.attention_mask.long().cumsum(-1) - 1).clamp_min(0)


def read(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GenerateCall:
    """Reads a call of `original`, a bound `_sample`.

    Raises:
        TypeError: the arguments do not fit, as they would not fit the original.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    model_kwargs = named.pop("model_kwargs", {})
    input_ids = named.pop("input_ids")
    processors, criteria = named.pop("logits_processor"), named.pop("stopping_criteria")
    config, streamer = named.pop("generation_config"), named.pop("streamer", None)
    reasons = [
        *_input_reasons(input_ids, model_kwargs),
        *_mode_reasons(config, named, model_kwargs),
        *_criteria_reasons(criteria),
    ]
    max_length = criteria.max_length or 0
    if not max_length:
        reasons.append("no length at which the call ends")
    elif not reasons and max_length <= input_ids.shape[1]:
        reasons.append("no room for a new token")
    request = None
    if not reasons:
        try:
            request = _request(processors, criteria, config)
        except sampling.Untraceable as error:
            reasons.append(str(error))
    return GenerateCall(
        input_ids, processors, criteria, config, streamer, model_kwargs, named, max_length, request, tuple(reasons)
    )


def _request(processors: Any, criteria: Any, config: Any) -> sampling.Request:
    ends = [criterion for criterion in criteria if type(criterion).__name__ == "EosTokenCriteria"]
    pad = probes.pad_token(config)
    wants_dict = bool(config.return_dict_in_generate)
    return sampling.plan(
        list(processors),
        do_sample=bool(config.do_sample),
        eos=[token for criterion in ends for token in sampling.eos_ids(criterion)],
        pad=pad,
        scores=wants_dict and bool(config.output_scores),
        logits=wants_dict and bool(config.output_logits),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _input_reasons(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> list[str]:
    if input_ids.ndim != 2 or not input_ids.numel():  # noqa: PLR2004 - rows and columns
        return [f"a prompt of shape {list(input_ids.shape)}"]
    reasons = []
    for name in ("attention_mask", "position_ids"):
        given = model_kwargs.get(name)
        if given is not None and given.shape != input_ids.shape:
            reasons.append(f"{name} of shape {list(given.shape)} for a prompt of shape {list(input_ids.shape)}")
    for name, value in model_kwargs.items():
        if name not in HANDLED and value is not None and value is not False:
            reasons.append(f"argument {name} for the model")
    if isinstance(model_kwargs.get("logits_to_keep"), torch.Tensor):
        reasons.append("logits_to_keep as a tensor")
    if probes.is_capturing(input_ids.device):
        reasons.append("a CUDA graph capture of the caller's is in progress")
    return reasons


def _mode_reasons(config: Any, named: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> list[str]:
    reasons = []
    if named.get("synced_gpus"):
        reasons.append("synced_gpus, which lets ranks decode in step")
    reasons += [f"argument {name}" for name, value in named.items() if name not in ("self", "synced_gpus") and value]
    if not config.use_cache or model_kwargs.get("use_cache") is False:
        reasons.append("use_cache=False")
    # Attentions and hidden states are only returned in a dict, but a region computes neither.
    reasons += [f"{name}=True" for name in ("output_attentions", "output_hidden_states") if getattr(config, name, None)]
    if getattr(config, "prefill_chunk_size", None):
        reasons.append("prefill_chunk_size")
    if getattr(config, "is_assistant", False):
        reasons.append("assisted decoding")
    cache = next((model_kwargs[name] for name in probes.CACHE_KEYWORDS if model_kwargs.get(name) is not None), None)
    if cache is not None and probes.user_gave_cache(cache):
        reasons.append("a KV cache of the caller's")
    elif cache is not None and not probes.is_plain_dynamic_cache(cache):
        reasons.append(
            f"cache_implementation={getattr(config, 'cache_implementation', None)!r} ({type(cache).__name__})"
        )
    return reasons


def _criteria_reasons(criteria: Any) -> list[str]:
    return [
        f"stopping criterion {type(criterion).__name__}"
        for criterion in criteria
        if type(criterion).__module__ != STOPPING_MODULE
        or type(criterion).__name__ not in ("MaxLengthCriteria", "EosTokenCriteria")
    ]
