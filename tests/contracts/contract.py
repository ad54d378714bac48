"""A contract: one thing of a host that hepatch relies on, and what hepatch does where it has moved."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from typing import Any


class Then(Enum):
    """What hepatch does where a contract does not hold; the value is for the failure message."""

    INACTIVE = "stays off: nothing is patched, and one line in the log names what is missing"
    EAGER = "generates eagerly, on transformers' own path and with its tokens, and the report says why"
    NATIVE = "still decodes in regions, by the next way that is right"


@dataclass(frozen=True)
class Contract:
    """One thing of a host.

    Attributes:
        name: its qualified name in the host.
        used_by: functions of `hepatch.probes`, or attributes of `hepatch.targets.TARGETS`, that rest on it.
        then: what hepatch does without it.
        holds: raises AssertionError, or whatever the host raises, where its presence, signature or meaning is another.
        drifts: ways in which a release could move it, each with what makes this process's host such a release.
        says: what the reason of the eager path, or the line in the log, must contain.
        since: the first release that has it; None where every supported one has. An older one is a drift by itself.
        before: what hepatch does on a release from before `since`, where that is not `then`.
        backend: the `torch.compile` backend that a drift is tried with.
        untried: why there is no drift, where there is none.
    """

    name: str
    used_by: tuple[str, ...]
    then: Then
    holds: Callable[[], None]
    drifts: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    says: str = ""
    since: str | None = None
    before: Then | None = None
    backend: str = "eager"
    untried: str = ""

    @property
    def host(self) -> str:
        """The host's package."""
        return self.name.partition(".")[0]

    def moved(self, error: Mapping[str, str]) -> str:
        """The failure message: what moved, in which release, and what hepatch does then."""
        what = f" ({error['error']}: {error['message']})"
        users = ", ".join(self.used_by)
        return (
            f"{self.name} is not what it was in {self.host} {metadata.version(self.host)}{what}."
            f" {users} rests on it; hepatch then {self.then.value}."
        )

    def is_older(self) -> bool:
        """Whether the installed host comes before the first release that has this."""
        return self.since is not None and _numbers(metadata.version(self.host)) < _numbers(self.since)


def show(owner: Any, name: str, make: Callable[[], Any]) -> None:
    """Let an attribute look different to hepatch alone: what the host makes of its own names stays as it is.

    A release that renames something uses the new name itself, so taking it away from everybody would only break the
    host. Reads count as hepatch's by the module of the code that reads.

    Args:
        owner: a module or a class; of a class the instances are meant.
        name: the attribute.
        make: gives what hepatch sees, or raises what it is to get.
    """
    if not isinstance(owner, types.ModuleType):
        setattr(owner, name, _shown(owner, name, make))
        return
    kind = type(owner)

    class Moved(kind):
        def __getattribute__(self, wanted):
            if wanted == name and _reader_is_hepatch():
                return make()
            return kind.__getattribute__(self, wanted)

    # Not a plain assignment: a module of settings takes it for one of them.
    types.ModuleType.__setattr__(owner, "__class__", Moved)


def _shown(owner: type, name: str, make: Callable[[], Any]) -> property:
    """The attribute of instances, as the host has it for everybody but hepatch."""
    missing = object()
    inherited = getattr(owner, name, missing)
    raw = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), missing)

    def read(self):
        if _reader_is_hepatch():
            return make()
        if name in self.__dict__:
            return self.__dict__[name]
        if inherited is missing:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return raw.__get__(self, type(self)) if hasattr(raw, "__get__") else raw

    def write(self, value):
        self.__dict__[name] = value

    return property(read, write)


def _reader_is_hepatch() -> bool:
    # This function, what stands for the attribute, and then whoever reads, perhaps through the class's own lookup.
    reader = sys._getframe(2)
    while reader.f_code.co_name == "__getattribute__" and reader.f_back is not None:
        reader = reader.f_back
    return reader.f_globals.get("__name__", "").partition(".")[0] == "hepatch"


def hide(find: Callable[[], Any], name: str) -> Callable[[], None]:
    """A drift: the attribute has another name, unknown to hepatch; `find` gives its owner, once it is tried."""

    def drift() -> None:
        owner = find()

        def gone() -> Any:
            raise AttributeError(f"{owner.__name__} has no attribute {name!r} any more", name=name)

        show(owner, name, gone)

    return drift


def hide_in(module: str, name: str) -> Callable[[], None]:
    """The same for an attribute of a module."""
    return hide(functools.partial(importlib.import_module, module), name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:3] if part.isdigit())
