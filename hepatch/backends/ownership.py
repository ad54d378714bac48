"""Which engine of a process has DeepSpeed's containers, and which has its model's own layers.

Containers share class-level counters, one counter of the position and one workspace in a process, so one engine at a
time has them; every other engine's models run their own layers. They are built only after a disposable copy has shown
that they compute what the model's layers compute (`container_admission`).
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from hepatch import kernel_probes, probes, settings
from hepatch.backends import container_admission
from hepatch.backends.container_admission import ContainersNotAdmittedError
from hepatch.backends.own_layers import OwnLayers
from hepatch.errors import first_line
from hepatch.report import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.backends.backend import Backend

_OBSTACLE = "_hepatch_no_containers"
_TRAINED = "_hepatch_trained_before_containers"
_owner: weakref.ref[Any] | None = None


def choose_policies(engine: Any, populate: Callable[[], None]) -> None:
    """Sets the engine's policies: stock's where its containers are admitted, none where they are not.

    Args:
        engine: a `DeepSpeedHybridEngine` under construction, its model in place and its containers not yet built.
        populate: stock's `populate_all_inference_policies`, bound to the engine.
    """
    global _owner  # noqa: PLW0603 - class counters, counter and workspace belong to the process, and so does their owner
    try:
        obstacle = _not_wanted(engine) or _taken()
        if obstacle is None:
            policies = kernel_probes.layer_policies(engine, populate)
            everything = engine.inference_policies
            container_admission.admit(engine, policies)
            engine.inference_policies = everything
            # What an engine before this one has left; the layers of this one are numbered from zero.
            kernel_probes.set_class_state(kernel_probes.fresh_class_state())
            engine.__dict__[_TRAINED] = [
                parameter for parameter in engine.module.parameters() if parameter.requires_grad
            ]
            _owner = weakref.ref(engine)
            return
    except ContainersNotAdmittedError as error:
        obstacle = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a policy that raises or exits costs the containers, never the run
        obstacle = f"DeepSpeed's containers cannot be built ({type(error).__name__}: {first_line(error)})"
        logger.debug("hepatch: the traceback of that", exc_info=error)
    engine.inference_policies = {}
    engine.__dict__[_OBSTACLE] = obstacle


def obstacle_of(engine: Any) -> str | None:
    """Why this engine has no containers of ours; None where it has, or was built before hepatch was on."""
    found: str | None = engine.__dict__.get(_OBSTACLE)
    return found


def backend_of(engine: Any, model: Any) -> Backend:
    """The backend of an engine that has just been attached.

    Args:
        engine: a `DeepSpeedHybridEngine`, constructed.
        model: its causal LM, or None.
    """
    owns = _owner is not None and _owner() is engine and bool(getattr(engine, "_inference_containers", ()))
    if model is None or not owns:
        return OwnLayers(model, obstacle_of(engine))
    from hepatch.backends.containers import Containers

    return Containers(engine, model, engine.__dict__.pop(_TRAINED, ()))


def _not_wanted(engine: Any) -> str | None:
    backend = settings.read().backend
    facts = probes.engine_facts(engine)
    model = probes.generation_model(engine.module)
    if facts["requested"] is False:
        return "the ds_config asks for no graph capture"
    if backend == "native":
        return "HEPATCH_BACKEND=native asks for the model's own layers"
    if model is None:
        return "there is no model with generate"
    if facts["zero_stage"] >= 3:  # noqa: PLR2004 - the stage that partitions the weights
        return "ZeRO stage 3 leaves containers no weights"
    if facts["release_inference_cache"]:
        return "release_inference_cache frees the workspace between generates"
    if facts["inference_tp_size"] > 1:
        return "collectives inside a region are not verified"
    if layers_come_first(backend, probes.static_cache_obstacle(model)):
        return "the native backend serves this model"
    return None


def layers_come_first(backend: str, static_cache: str | None) -> bool:
    """Whether the native backend is tried before DeepSpeed's containers.

    It is not slower, needs no op to be built, keeps one graph for many positions, and has no counter on the host.

    Args:
        backend: as set, "auto", "kernels" or "native".
        static_cache: why the native backend cannot serve the model; None where it can.
    """
    return backend == "native" or (backend == "auto" and static_cache is None)


def _taken() -> str | None:
    global _owner  # noqa: PLW0603 - see choose_policies
    if _owner is not None:
        if _owner() is not None:
            # An engine that was let go may still hang in a cycle.
            gc.collect()
        if _owner() is not None:
            return (
                "another engine of this process has DeepSpeed's containers, which share one workspace and one position"
            )
        _owner = None
        kernel_probes.set_class_state(kernel_probes.fresh_class_state())
    if kernel_probes.class_state().layers:
        return "containers that were built without hepatch may still be in use in this process"
    return None
