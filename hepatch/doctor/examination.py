"""The examination: gathers versions, capabilities, patches, guards and what stock would do into one diagnosis."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hepatch import activation, settings
from hepatch.doctor import capabilities, configuration, patches
from hepatch.doctor.configuration import BadInputError, Configuration
from hepatch.doctor.findings import Diagnosis, Judgement
from hepatch.facts import Call, Facts
from hepatch.guards import GUARDS
from hepatch.report import versions

if TYPE_CHECKING:
    from hepatch.guards import Guard

_NEEDS_MODEL = ("model", "static-cache", "hooks", "length")
_NEEDS_ENGINE = ("containers", "weights", "hooks", "weights-offloaded", "earlier-failure")
_NO_MODEL = "no model was given: add --model FOLDER"
_AT_EACH_CALL = "decided at each generate"


def examine(config: Path | None, model: str | None, imports: Sequence[str] = ()) -> Diagnosis:
    """Looks at everything but a running engine.

    Args:
        config: a ds_config file; None: a plain hybrid engine.
        model: a folder, a `config.json` or a shape; None: guards that need one stay open.
        imports: modules to import first, whose patches are then seen.

    Raises:
        BadInputError: what was given cannot be read.
    """
    found = Diagnosis()
    ds_config = configuration.read(config)
    hosts = capabilities.load_hosts()
    found.problems += [f"{host.name}: {host.detail}; {host.meaning}" for host in hosts if not host.present]
    found.versions = {**versions(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in imports:
        _import(name)
    read = settings.read()
    found.settings = _changed(read)
    found.patches = patches.look()
    found.hook_traceback = activation.last_error()
    found.capabilities = hosts
    found.given = {"ds_config": "none, a plain hybrid engine" if config is None else config.name}
    found.given["model"] = "none" if model is None else Path(model).name
    if found.problems:
        return found
    if found.hook_traceback is not None:
        found.problems.append("hepatch could not patch the installed releases; the traceback is below")
    elif activation.is_on():
        broken = [patch for patch in found.patches if not patch.works]
        found.problems += [f"{patch.name}: {patch.state}; {patch.remedy}" for patch in broken]
    found.capabilities += [*capabilities.machine(), *capabilities.inference_op()]
    skeleton = None if model is None else configuration.skeleton(model)
    _judge(found, read, ds_config, skeleton)
    _ask_stock(found, ds_config, skeleton)
    return found


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise BadInputError(f"--import {name} fails: {type(error).__name__}: {error}") from error


def _changed(read: settings.Settings) -> dict[str, str]:
    fields = settings.Settings.model_fields
    return {
        settings.variable_of(name): str(getattr(read, name))
        for name, field in fields.items()
        if getattr(read, name) != field.default
    }


def _judge(found: Diagnosis, read: settings.Settings, ds_config: Configuration, model: Any | None) -> None:
    from hepatch import stock_probes

    if not ds_config.hybrid:
        found.guards.append(
            Judgement(
                "hybrid-engine",
                "fail",
                "hybrid_engine.enabled is not true, so deepspeed.initialize makes a plain engine",
                'Add {"hybrid_engine": {"enabled": true}} to the ds_config',
            )
        )
    known = _known_fields()
    complaint = stock_probes.validate_section(settings.without_hepatch_keys(ds_config.section, known))
    if complaint is not None:
        found.problems.append(f"the hybrid_engine section is not accepted: {complaint}")
        return
    facts, serves = facts_of(read, ds_config, model)
    found.guards += [_judgement(guard, facts, has_model=model is not None) for guard in GUARDS]
    if not any(guard.outcome == "fail" for guard in found.guards):
        found.backend = serves


def facts_of(read: settings.Settings, ds_config: Configuration, model: Any | None) -> tuple[Facts, str]:
    """What the guards are told, as far as it can be known before an engine exists, and which backend would serve."""
    import torch

    from hepatch import probes
    from hepatch.doctor import backend

    section = ds_config.section
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about_model: dict[str, Any] = {}
    serves = "kernels" if read.backend == "kernels" else "native"
    if model is not None:
        inner = probes.generation_model(model)
        inner = inner if hasattr(type(inner), "_sample") and _has_head(inner) else None
        about_model = {"causal_lm": inner is not None, "model_name": type(model).__name__}
        if inner is not None:
            no_kernels = None if read.backend == "native" else backend.kernels_obstacle(inner)
            static_cache = probes.static_cache_obstacle(inner)
            serves, static_cache, no_kernels = backend.choose(read.backend, static_cache, no_kernels)
            about_model |= {
                "static_cache": static_cache,
                "no_kernels": no_kernels,
                "max_positions": probes.max_positions(inner),
            }
    facts = Facts(
        enabled=activation.is_on(),
        requested=settings.graph_capture_requested(section),
        zero_stage=ds_config.zero_stage,
        release_inference_cache=bool(section.get("release_inference_cache", False)),
        inference_tp_size=int(section.get("inference_tp_size", 1)),
        compiler_missing=probes.compiler_obstacle(device, read.compile_backend),
        cache_mib_budget=read.cache_mib,
        call=Call(training=False, total_tokens=0),
        **about_model,
    )
    return facts, serves


def _has_head(model: Any) -> bool:
    return model is not None and model.get_output_embeddings() is not None


def _judgement(guard: Guard, facts: Facts, *, has_model: bool) -> Judgement:
    refusal = guard.judge(facts)
    if refusal is not None:
        return Judgement(guard.rule, "fail", refusal.reason, refusal.remedy)
    if guard.rule in _NEEDS_MODEL and not has_model:
        return Judgement(guard.rule, "open", _NO_MODEL)
    if guard.scope == "call" or guard.rule in _NEEDS_ENGINE:
        return Judgement(guard.rule, "open", _AT_EACH_CALL)
    return Judgement(guard.rule, "pass")


def _known_fields() -> Any:
    from deepspeed.runtime.config import HybridEngineConfig

    return getattr(HybridEngineConfig, "model_fields", {})


def _ask_stock(found: Diagnosis, ds_config: Configuration, model: Any | None) -> None:
    from hepatch.doctor import stock

    try:
        found.stock = stock.outlook(model, ds_config)
    except Exception as error:  # noqa: BLE001 - a DeepSpeed that is built otherwise; the rest of the block still counts
        found.stock = [f"DeepSpeed could not be asked: {type(error).__name__}: {error}."]
