"""What is patched in DeepSpeed and transformers, and for each: why this seam, and what it does not reach.

The wrappers repair what breaks a hybrid engine on the installed pair of releases, and lead each generate to
`hepatch.decode`. No container of DeepSpeed is built before a disposable copy of the model has shown that it is right:
with grouped-query Llama building one damages the user's weights, with Bloom it ends the process, with current
transformers most of them fail in the first generate.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from hepatch.patching import Target, Wrapper
from hepatch.report import OnceLog

HOSTS = ("deepspeed.runtime.hybrid_engine", "transformers.generation.utils")
"""The modules whose loading makes targets available; DeepSpeed's config module is loaded before the first of them."""

# What every supported release passes to the loop, the first by position; 4.44 adds logits_warper.
_LOOP_PARAMETERS = (
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "streamer",
)

_said = OnceLog()

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def _accept_capture_keys(wrapped: Any, _: Any, args: Arguments, kwargs: Keywords) -> Any:
    from hepatch import settings

    config = args[0] if args else kwargs["param_dict"]
    section = config.get("hybrid_engine")
    if not isinstance(section, Mapping):
        return wrapped(*args, **kwargs)
    # DeepSpeed judges the keys it knows. This judges the others, before an engine is built.
    settings.graph_capture_requested(section)
    model = getattr(sys.modules["deepspeed.runtime.config"], "HybridEngineConfig", None)
    fields = getattr(model, "model_fields", {})
    # A new dictionary: the user's own is the record of what was asked and stays as it is.
    return wrapped({**config, "hybrid_engine": settings.without_hepatch_keys(section, fields)})


def _attach_when_built(wrapped: Any, engine: Any, args: Arguments, kwargs: Keywords) -> Any:
    wrapped(*args, **kwargs)
    if callable(getattr(engine.module, "generate", None)):
        _give_generate(engine)
    _attach(engine)


def _admitted_policies(wrapped: Any, engine: Any, _args: Arguments, _kwargs: Keywords) -> Any:
    # What follows in the constructor reads the attribute, whatever becomes of the rest.
    engine.inference_policies = {}
    from hepatch.backends import ownership

    ownership.choose_policies(engine, wrapped)


def _generate(wrapped: Any, engine: Any, args: Arguments, kwargs: Keywords) -> Any:
    _attach(engine)
    _give_generate(engine)
    backend = _backend_of(engine)
    if not args and "input_ids" not in kwargs and kwargs.get("inputs") is not None:
        kwargs = dict(kwargs)
        args = (kwargs.pop("inputs"),)
    # Not getattr: DeepSpeed's engine answers for attributes of its module. One that keeps no batch needs none.
    if engine.__dict__.get("_total_batch_size", 0) is None:
        engine._total_batch_size = _rows(args, kwargs) * int(engine.world_size)
    with contextlib.nullcontext() if backend is None else backend.engine_generates():
        return wrapped(*args, **kwargs)


def _attach_older_engine(wrapped: Any, engine: Any, args: Arguments, kwargs: Keywords) -> Any:
    result = wrapped(*args, **kwargs)
    _attach(engine)
    backend = _backend_of(engine)
    if backend is not None:
        backend.step_aside()
    return result


def _backend_of(engine: Any) -> Any | None:
    """The backend of an engine that is attached, or None."""
    attachments = sys.modules.get("hepatch.attachments")
    attachment = None if attachments is None else attachments.of_engine(engine)
    return None if attachment is None else attachment.backend


def _lazy_workspace(wrapped: Any, _: Any, args: Arguments, kwargs: Keywords) -> Any:
    from hepatch.workspace import LazyWorkspace

    return LazyWorkspace(lambda: wrapped(*args, **kwargs))


def _sample(wrapped: Any, model: Any, args: Arguments, kwargs: Keywords) -> Any:
    attachment = _attachment_of(model)
    if attachment is None:
        return wrapped(*args, **kwargs)
    from hepatch import decode

    return decode.sample(_readable(wrapped), attachment, args, kwargs)


def _watched(mode: str) -> Wrapper:
    """A wrapper of a decoding loop that a region has no part in: the report says so."""

    def watch(wrapped: Any, model: Any, args: Arguments, kwargs: Keywords) -> Any:
        attachment = _attachment_of(model)
        if attachment is None:
            return wrapped(*args, **kwargs)
        from hepatch import decode

        return decode.watch(wrapped, attachment, args, kwargs, mode)

    return watch


def _mark_callers_cache(wrapped: Any, model: Any, args: Arguments, kwargs: Keywords) -> Any:
    if _attachment_of(model) is not None:
        from hepatch import probes

        probes.mark_callers_cache(inspect.signature(wrapped).bind(*args, **kwargs).arguments["model_kwargs"])
    return wrapped(*args, **kwargs)


def _attachment_of(model: Any) -> Any | None:
    # Nothing is attached before that module is loaded, and a program without an engine never loads it.
    attachments = sys.modules.get("hepatch.attachments")
    return None if attachments is None else attachments.of_model(model)


def _readable(loop: Any) -> Any:
    """A bound sampling loop whose signature names its parameters, also where another library's wrapper hides them."""
    first, *others = _LOOP_PARAMETERS
    parameters = list(inspect.signature(loop).parameters.values())
    names = [parameter.name for parameter in parameters]
    if names[0] == first:
        return loop
    if first in names:
        # Called through its class, as generate does: wrapt before 2 shows the instance that it has already passed.
        parameters = parameters[names.index(first) :]
    else:
        parameters = [inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in others]
        parameters.append(inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD))
    named = functools.partial(loop)
    named.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return named


def _attach(engine: Any) -> None:
    """Attach an engine; a failure costs it the regions and a warning, never the user's call.

    Raises:
        Exception: whatever it was, under `HEPATCH_STRICT=1`.
    """
    try:
        from hepatch import attachments

        attachments.attach(engine)
    except Exception as error:
        from hepatch import settings

        if settings.read().strict:
            raise
        name = type(engine.module).__name__
        _said.warn(name, f"hepatch: eager for {name} [attach]: {type(error).__name__}: {error}. Please report this.")


def _give_generate(engine: Any) -> None:
    """Let the engine's `generate` reach its model's, as it is now.

    Raises:
        AttributeError: the model has none.
    """
    if getattr(engine, "_inference_containers", ()):
        # Built by stock: there the model's generate leads to the engine's, and the engine holds the original.
        return
    module = engine.module
    generate = getattr(module, "generate", None)
    if getattr(generate, "__self__", None) is engine:
        # Somebody lets the model's generate lead to the engine's, as stock does: what its class has is the original.
        generate = getattr(type(module), "generate", None)
        generate = None if generate is None else generate.__get__(module)
    if not callable(generate):
        # What Python says of a method that is not there, and what stock raises here.
        name = type(module).__name__
        raise AttributeError(f"engine.generate needs a model with a generate method; {name} has none.")  # noqa: TRY004
    engine._generate = generate


def _rows(args: Arguments, kwargs: Keywords) -> int:
    for value in (*args[:1], *(kwargs.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))):
        if hasattr(value, "shape") and len(value.shape) > 0:
            return int(value.shape[0])
    return 1


_ENGINE = "DeepSpeedHybridEngine"

TARGETS = (
    Target(
        module="deepspeed.runtime.config",
        owner="",
        attribute="get_hybrid_engine_config",
        wrapper=_accept_capture_keys,
        parameters=("param_dict",),
        why=(
            "The last place where the raw section is seen: the config class forbids keys that it does not know, and its"
            " default False cannot be told from a user's. DeepSpeedConfig looks the function up in its module on each"
            " call. Does not reach a HybridEngineConfig that is built by hand."
        ),
    ),
    Target(
        module="deepspeed.runtime.hybrid_engine",
        owner=_ENGINE,
        attribute="populate_all_inference_policies",
        wrapper=_admitted_policies,
        why=(
            "The table of policies decides which layers get a container, before any is built and before a policy can"
            " raise or exit. An empty one leaves the model its own layers; stock's is used where containers were"
            " admitted. Does not reach engines built earlier."
        ),
    ),
    Target(
        module="deepspeed.runtime.hybrid_engine",
        owner="",
        attribute="WorkspaceOp",
        wrapper=_lazy_workspace,
        why=(
            "The engine's constructor looks this name up in its module and builds the inference op through it, for"
            " every model. Containers take the class from its own module and are not reached; an engine that has some"
            " is given theirs."
        ),
    ),
    Target(
        module="deepspeed.runtime.hybrid_engine",
        owner=_ENGINE,
        attribute="__init__",
        wrapper=_attach_when_built,
        why=(
            "The class is bound by name in deepspeed/__init__.py, so methods are patched and the name is not rebound."
            " Without containers stock leaves `_generate` unset. Does not reach engines built earlier: eval and"
            " generate do."
        ),
    ),
    Target(
        module="deepspeed.runtime.hybrid_engine",
        owner=_ENGINE,
        attribute="generate",
        wrapper=_generate,
        why=(
            "Stock reads the batch from the first argument or from input_ids= alone. Does not reach"
            " engine.module.generate, which needs no repair."
        ),
    ),
    Target(
        module="deepspeed.runtime.hybrid_engine",
        owner=_ENGINE,
        attribute="eval",
        wrapper=_attach_older_engine,
        why=(
            "Called before every rollout, after the engine exists, whenever hepatch was imported: the place to meet"
            " engines built earlier, whose user calls engine.module.generate. Does not reach a user who never calls"
            " engine.eval()."
        ),
    ),
    Target(
        module="transformers.generation.utils",
        owner="GenerationMixin",
        attribute="_sample",
        wrapper=_sample,
        parameters=_LOOP_PARAMETERS,
        why=(
            "generate reads it from the class and has prepared everything by then: configuration, processors, criteria,"
            " expansion. Models that no engine owns take one lookup more and then the original. Does not reach beam"
            " search, assisted decoding or custom_generate, which never come here."
        ),
    ),
    Target(
        module="transformers.generation.utils",
        owner="GenerationMixin",
        attribute="_prepare_cache_for_generation",
        wrapper=_mark_callers_cache,
        parameters=("model_kwargs",),
        optional=True,
        why=(
            "The last place where a KV cache of the caller's can be told from one that transformers prepares: an empty"
            " one must be filled, which a region does not do. Current releases mark it here themselves. Does not reach"
            " releases that prepare caches inside generate; they have no caches that a region could stand in for."
        ),
    ),
    *(
        Target(
            module="transformers.generation.utils",
            owner="GenerationMixin",
            attribute=attribute,
            wrapper=_watched(mode),
            optional=True,
            why=f"For the report alone: {mode} takes transformers' own path, and the report would not know of it.",
        )
        for attribute, mode in (("_beam_search", "beam search"), ("_assisted_decoding", "assisted decoding"))
    ),
)
"""Every patched attribute. All of those whose module is loaded are applied, or none."""
