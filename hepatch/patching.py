"""One attribute patch: apply, revert, state. Knows no torch, no DeepSpeed and no transformers.

Invariants, each with a test:

* what was there before is read raw, from the `__dict__` that owns it, and put back as the same object; a name that its
  owner only inherited is deleted again;
* an attribute is touched only while what stands there is ours. Whoever wrapped on top of us keeps their wrapper, and
  ours beneath it turns into one plain call to the original, because the switch is asked on every call;
* of all wrappers that one patch ever installed at most one acts, so a wrapper that another library holds or brings
  back later can never act a second time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import wrapt

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""What runs in place of an attribute: `wrapper(wrapped, instance, args, kwargs)`; `wrapped` is bound already."""

_MISSING = object()
_MAX_LAYERS = 64
# Where a callable keeps what it calls: wrappers, one of ours that was fetched through its class, methods, partials.
_INNER = ("__wrapped__", "_self_parent", "__func__", "func")


class MissingTargetError(Exception):
    """The host lacks an attribute that is to be patched, or a parameter that the patch relies on."""


@dataclass(frozen=True)
class Target:
    """One attribute of a host module.

    Attributes:
        module: dotted name of the module; it is looked up where it is loaded and never imported.
        owner: dotted path of the class inside the module, "" for an attribute of the module itself.
        attribute: name of the function, method or class.
        wrapper: what runs in its place.
        why: why this seam, and what it does not reach.
        parameters: names that its signature must have, because the wrapper relies on them.
        optional: a host without it is patched all the same.
    """

    module: str
    owner: str
    attribute: str
    wrapper: Wrapper
    why: str
    parameters: tuple[str, ...] = ()
    optional: bool = False

    @property
    def name(self) -> str:
        """The qualified name, as the report and the log have it."""
        return ".".join(filter(None, (self.module, self.owner, self.attribute)))


# Generic for type checkers since wrapt 2 and not at run time before it.
class Installed(wrapt.FunctionWrapper):  # type: ignore[misc,type-arg,unused-ignore]
    """What stands in the place of a patched attribute; name, doc and signature are the original's."""

    def __init__(self, wrapped: Any, patch: Patch, prior: Any) -> None:
        """Wrap `wrapped`; `prior` is what goes back into the owner, `_MISSING` where the name was inherited."""
        super().__init__(wrapped, patch.target.wrapper, enabled=functools.partial(patch._acts, self))
        self._self_patch = patch
        self._self_prior = prior

    # A function is copied and pickled by reference; so is what stands in its place.
    def __copy__(self) -> Installed:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Installed:
        return self

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__qualname__)


class Patch:
    """The patch of one target; not safe for threads by itself, its caller holds a lock."""

    def __init__(self, target: Target, switch: Callable[[], bool]) -> None:
        """Prepare a patch of `target`; `switch` is asked on every call whether the wrapper acts."""
        self.target = target
        self._switch = switch
        self._current: Installed | None = None

    def verify(self) -> None:
        """Look whether the target can be patched, and touch nothing.

        Raises:
            MissingTargetError: naming what the host lacks.
        """
        owner, raw = self._look()
        found = _beneath_ours(self, raw)
        if not callable(found) and not isinstance(found, (staticmethod, classmethod)):
            raise MissingTargetError(f"{self.target.name} is no function")
        lacking = _lacking_parameters(found, self.target.parameters, getattr(owner, "__module__", self.target.module))
        if lacking:
            raise MissingTargetError(f"{self.target.name} has no parameter {', '.join(lacking)}")

    def apply(self) -> None:
        """Put the wrapper in place; where it already is, on top or under somebody else's, return quietly.

        Raises:
            MissingTargetError: the attribute is gone.
        """
        owner, raw = self._look()
        if self._current is not None and any(layer is self._current for layer in _layers(raw)):
            return
        while isinstance(raw, Installed) and raw._self_patch is self:
            # One of ours that somebody brought back: it must not become what the next revert restores.
            _put_back(owner, self.target.attribute, raw._self_prior)
            owner, raw = self._look()
        prior = vars(owner).get(self.target.attribute, _MISSING)
        self._current = Installed(raw, self, prior)
        setattr(owner, self.target.attribute, self._current)

    def revert(self) -> None:
        """Take the wrapper out where it is on top; leave it, inert, where somebody wrapped it. Twice is silent."""
        try:
            owner, raw = self._look()
            while isinstance(raw, Installed) and raw._self_patch is self:
                _put_back(owner, self.target.attribute, raw._self_prior)
                owner, raw = self._look()
        except MissingTargetError:
            raw = None
        if self._current is not None and not any(layer is self._current for layer in _layers(raw)):
            self._current = None

    @property
    def state(self) -> str:
        """One of `applied`, `applied under <who>`, `not applied`, `buried under <who>`, or what is missing."""
        try:
            _, raw = self._look()
        except MissingTargetError as error:
            return f"not applied: {error}"
        if self._current is None or not any(layer is self._current for layer in _layers(raw)):
            return "not applied"
        if raw is self._current:
            return "applied"
        who = f"{getattr(raw, '__module__', None) or 'another'}.{getattr(raw, '__qualname__', type(raw).__qualname__)}"
        return f"applied under {who}" if self._switch() else f"buried under {who}"

    def _acts(self, installed: Installed) -> bool:
        return installed is self._current and self._switch()

    def _look(self) -> tuple[Any, Any]:
        """Return the object that the attribute is set on and the raw value that a lookup through it finds."""
        module = sys.modules.get(self.target.module)
        if module is None:
            raise MissingTargetError(f"{self.target.module} is not loaded")
        path = ".".join(filter(None, (self.target.owner, self.target.attribute)))
        try:
            owner, _, raw = wrapt.resolve_path(module, path)
        except AttributeError:
            raise MissingTargetError(f"{self.target.name} is missing") from None
        return owner, raw


def _put_back(owner: Any, attribute: str, prior: Any) -> None:
    if prior is _MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, prior)


def _beneath_ours(patch: Patch, raw: Any) -> Any:
    while isinstance(raw, Installed) and raw._self_patch is patch:
        raw = raw.__wrapped__
    return raw


def _layers(raw: Any) -> Iterator[Any]:
    """Yield a callable and whatever it keeps to call: wrapped, in a closure or as the default of a parameter."""
    pending, seen = [raw], 0
    while pending and seen < _MAX_LAYERS:
        layer = pending.pop()
        seen += 1
        yield layer
        inner = [getattr(layer, name, None) for name in _INNER]
        inner += getattr(layer, "__defaults__", None) or ()
        inner += (getattr(layer, "__kwdefaults__", None) or {}).values()
        for cell in getattr(layer, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                inner.append(cell.cell_contents)
        pending.extend(value for value in inner if callable(value) and not inspect.isclass(value))


def _lacking_parameters(found: Any, wanted: tuple[str, ...], home: str) -> list[str]:
    if not wanted:
        return []
    parameters = inspect.signature(getattr(found, "__func__", found)).parameters
    lacking = [name for name in wanted if name not in parameters]
    kinds = {parameter.kind for parameter in parameters.values()}
    hides = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    # Somebody else's wrapper that passes everything on says nothing about what is beneath it.
    if lacking and hides and getattr(found, "__module__", None) != home:
        return []
    return lacking
