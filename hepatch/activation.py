"""Switching hepatch on and off: import hooks, all targets or none, the same result in every order.

The one state that counts is what was asked last (importing asks for on) and which host modules are loaded. A hook that
fires late looks at both, so it does nothing after `disable()`; `enable()` applies whatever the hooks could not.

Nothing raised in here leaves an import hook, because that would make the host's own import fail; `last_error()` keeps
it. Modules are imported before the lock is taken and never under it: a thread that holds an import lock and waits for
ours would otherwise stop one that holds ours and waits for the import.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import traceback
from types import ModuleType
from typing import TYPE_CHECKING

import wrapt

from hepatch.patching import MissingTargetError, Patch
from hepatch.report import logger
from hepatch.targets import HOSTS, TARGETS

if TYPE_CHECKING:
    from hepatch.settings import Settings


class _Switch:
    """What was asked, what is in force, and why not where they differ."""

    def __init__(self) -> None:
        self.wanted = True
        self.on = False
        self.why_off = ""
        self.error: str | None = None
        self.level = logging.NOTSET

    def is_on(self) -> bool:
        return self.on


_switch = _Switch()
_lock = threading.RLock()
_engines_lock = threading.RLock()
_patches = tuple(Patch(target, _switch.is_on) for target in TARGETS)
_ready: set[str] = set()
_registered = False


def register() -> None:
    """Ask to be called once DeepSpeed and transformers are loaded, or now if they are. Twice is silent."""
    global _registered  # noqa: PLW0603 - hooks belong to the process, and so does the note that they are there
    with _lock:
        if _registered:
            return
        _registered = True
    for host in HOSTS:
        if _is_half_loaded(host):
            # Another thread is importing it: this waits. Where it is this thread, in the middle of that import, the
            # hook would find half a module; a later enable() or the other host's hook sees to it.
            with contextlib.suppress(Exception):
                importlib.import_module(host)
            if _is_half_loaded(host):
                continue
        wrapt.register_post_import_hook(_host_loaded, host)


def enable() -> None:
    """Switch hepatch on: now for hosts that are loaded, later for the others, also for engines that exist already.

    Calling it again changes nothing. `HEPATCH=0` in the environment wins over it.

    Raises:
        RuntimeError: under `HEPATCH_STRICT=1` only, an attribute to be patched is missing in the installed DeepSpeed or
            transformers; nothing is patched then. Without it, one warning says the same.
        ValueError: under `HEPATCH_STRICT=1` only, a variable has a value that is not accepted.
    """
    settings = _read_settings()
    register()
    if not settings.enabled:
        logger.info("hepatch: HEPATCH=0 is set in the environment, so enable() does nothing.")
    with _lock:
        _switch.wanted = True
        failure = _apply(enabled=settings.enabled)
    _tell_engines()
    if failure is not None and settings.strict:
        raise RuntimeError(failure)


def disable() -> None:
    """Switch hepatch off: class patches and regions are taken away at once, also from engines that exist.

    Such engines keep what they were built with, their own layers and a `generate` that works; only new ones are stock.
    Calling it again changes nothing.
    """
    with _lock:
        _switch.wanted = False
        _revert("hepatch.disable() was called")
    _tell_engines()


def is_on() -> bool:
    """Whether patches are in force."""
    return _switch.on


def last_error() -> str | None:
    """The traceback of what last kept the patches off, None where nothing did."""
    return _switch.error


def patch_states() -> dict[str, str]:
    """The state of every patch by qualified name: "applied", or why not."""
    with _lock:
        return {patch.target.name: _explained(patch.state) for patch in _patches}


def _host_loaded(module: ModuleType) -> None:
    try:
        settings = _read_settings()
        with _lock:
            # The import system still marks the module as being initialised while its hooks run.
            _ready.add(module.__name__)
            _apply(enabled=settings.enabled)
    except Exception as error:  # noqa: BLE001 - whatever it is, the host's import must succeed
        with _lock:
            _fail(error)


def _read_settings() -> Settings:
    # Late, because pydantic must not be loaded by an import of hepatch alone.
    from hepatch import settings

    read = settings.read()
    if logger.level in (logging.NOTSET, _switch.level):
        # A level that the user set on our logger is theirs.
        _switch.level = logging.getLevelName(read.log.upper())
        logger.setLevel(_switch.level)
    return read


def _apply(*, enabled: bool) -> str | None:
    """Bring the patches to what is wanted; return the line that says why not, None where nothing is wrong."""
    if not _switch.wanted:
        return None
    if not enabled:
        _revert("HEPATCH=0 is set in the environment")
        return None
    within_reach = [patch for patch in _patches if _is_loaded(patch.target.module) and not _may_miss(patch)]
    try:
        for patch in within_reach:
            patch.verify()
        for patch in within_reach:
            patch.apply()
    except Exception as error:  # noqa: BLE001 - half a patch is worse than none, whatever it was
        return _fail(error)
    _switch.on, _switch.why_off = True, ""
    return None


def _may_miss(patch: Patch) -> bool:
    """Whether a patch is left out because this host lacks its target and nothing depends on it."""
    if not patch.target.optional:
        return False
    try:
        patch.verify()
    except MissingTargetError:
        return True
    return False


def _fail(error: Exception) -> str:
    """Leave everything unpatched because of an error, log its line once, and return it."""
    if isinstance(error, MissingTargetError):
        why = f"{error} in the installed release"
        remedy = "Install a release that has it, or a hepatch that knows this one."
    else:
        why = f"{type(error).__name__}: {error}"
        remedy = "hepatch.activation.last_error() has the traceback."
    _switch.error = traceback.format_exc()
    line = f"hepatch: stays off: {why}. {remedy}"
    if _switch.why_off != why:
        logger.warning("%s", line)
    _revert(why)
    return line


def _revert(why: str) -> None:
    _switch.on, _switch.why_off = False, why
    for patch in _patches:
        patch.revert()


def _is_loaded(name: str) -> bool:
    return name in sys.modules and (name in _ready or not _is_half_loaded(name))


def _is_half_loaded(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _explained(state: str) -> str:
    if state == "not applied" and _switch.why_off:
        return f"not applied: {_switch.why_off}"
    return state


def _tell_engines() -> None:
    """Suspend or resume every live engine, whichever is in force when its turn comes."""
    attachments = sys.modules.get("hepatch.attachments")
    if attachments is None:
        return
    with _engines_lock:
        for attachment in attachments.live():
            if _switch.on:
                attachment.resume()
            else:
                attachment.suspend()
