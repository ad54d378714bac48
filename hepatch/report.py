"""What hepatch says: counters, the log that says a thing once, and the record that `hepatch.report(engine)` returns."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from hepatch.guards import Refusal

_REPORTED_PACKAGES = ("hepatch", "torch", "deepspeed", "transformers")


class RankFilter(logging.Filter):
    """Lets rank 0 speak, and everyone while no process group exists."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this process writes the record."""
        # Looked up and not imported: whoever logs before torch is loaded must not load it.
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return True
        return bool(distributed.get_rank() == 0)


logger = logging.getLogger("hepatch")
"""The package's logger: no handlers, propagates; its level is `HEPATCH_LOG`."""
if not any(isinstance(existing, RankFilter) for existing in logger.filters):
    logger.addFilter(RankFilter())


def refusal_line(scope: str, refusal: Refusal) -> str:
    """The log line of a refusal; `scope` names what stays eager, usually the model's class."""
    return f"hepatch: eager for {scope} [{refusal.rule}]: {refusal.reason}. {refusal.remedy}."


class OnceLog:
    """Says a thing as a warning once, and at debug level from then on."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, rule_key: str, message: str) -> None:
        """Log `message`: WARNING the first time that `rule_key` comes up, DEBUG later."""
        logger.log(logging.DEBUG if rule_key in self._said else logging.WARNING, "%s", message)
        self._said.add(rule_key)

    def forget(self) -> None:
        """Warn again about everything."""
        self._said.clear()


@dataclass
class Counters:
    """What one engine has done since it was built or reset.

    Attributes:
        compilations: times that the decode step was compiled.
        recordings: CUDA graphs recorded, one for each region key; 0 without CUDA.
        replays: decode steps that replayed a CUDA graph; 0 without CUDA.
        recoveries: calls that failed inside and ended eagerly.
        region_steps: decode steps that went through a region.
        eager_calls: generates that took the original path from the start.
        failures: what failed, one line each, oldest first.
    """

    compilations: int = 0
    recordings: int = 0
    replays: int = 0
    recoveries: int = 0
    region_steps: int = 0
    eager_calls: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LastCall:
    """How the latest generate of an engine went.

    Attributes:
        path: "fused" (selection inside the region), "forward" (only the logits come from it) or "eager".
        reason: why it was not fused, None where it was.
        prompt_tokens: columns of the prompt.
        new_tokens: columns that were added.
        region_steps: decode steps that went through a region.
        eager_steps: forwards outside it, the prompt's included.
    """

    path: Literal["fused", "forward", "eager"]
    reason: str | None
    prompt_tokens: int
    new_tokens: int
    region_steps: int
    eager_steps: int


@dataclass(frozen=True)
class Report:
    """What `hepatch.report(engine)` returns; `str()` of it can be pasted into an issue, `to_dict()` is plain JSON data.

    Attributes:
        active: whether a plain greedy generate would use a region now.
        backend: "kernels", "native" or "none".
        refusals: every rule that refuses now, in reading order.
        patches: qualified name of each patched attribute, and "applied" or why not.
        compilations: times that the decode step was compiled.
        recordings: CUDA graphs recorded, one for each region key; 0 without CUDA.
        recording_limit: region keys that may be admitted.
        replays: decode steps that replayed a CUDA graph; 0 without CUDA.
        recoveries: calls that failed inside and ended eagerly.
        failures: what failed, one line each, oldest first.
        cache_mib: memory of the static KV cache, in MiB.
        graph_mib: memory of the recorded graphs, in MiB; 0 without CUDA.
        last_call: the latest generate, None before the first.
    """

    active: bool
    backend: Literal["kernels", "native", "none"]
    refusals: tuple[Refusal, ...]
    patches: Mapping[str, str]
    compilations: int
    recordings: int
    recording_limit: int
    replays: int
    recoveries: int
    failures: tuple[str, ...]
    cache_mib: float
    graph_mib: float
    last_call: LastCall | None

    def to_dict(self) -> dict[str, Any]:
        """The report as data that `json.dumps` takes; `versions` is added."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["refusals"] = [asdict(refusal) for refusal in self.refusals]
        plain["patches"] = dict(self.patches)
        plain["failures"] = list(self.failures)
        plain["last_call"] = None if self.last_call is None else asdict(self.last_call)
        return {"versions": versions(), **plain}

    def __str__(self) -> str:
        """A block of lines for an issue."""
        return "\n".join(
            [
                " · ".join(f"{name} {version}" for name, version in versions().items()),
                f"active: {'yes' if self.active else 'no'}, backend {self.backend}",
                *(f"refused [{refusal.rule}]: {refusal.reason}. {refusal.remedy}." for refusal in self.refusals),
                f"compilations {self.compilations}, replays {self.replays}, recoveries {self.recoveries}",
                f"recordings {self.recordings} of at most {self.recording_limit}",
                f"memory: cache {self.cache_mib:.1f} MiB, graphs {self.graph_mib:.1f} MiB",
                _last_call_line(self.last_call),
                *(f"failure: {failure}" for failure in self.failures),
                *(f"patch {name}: {state}" for name, state in self.patches.items()),
            ]
        )


def versions() -> dict[str, str]:
    """Versions of hepatch, torch, deepspeed, transformers and Python, read without importing any of them."""
    return {name: _version(name) for name in _REPORTED_PACKAGES} | {"python": platform.python_version()}


def _version(package: str) -> str:
    # A loaded module is the better witness: a folder on the path may stand before the installed distribution.
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _last_call_line(last_call: LastCall | None) -> str:
    if last_call is None:
        return "last call: none yet"
    why = "" if last_call.reason is None else f" ({last_call.reason})"
    return (
        f"last call: {last_call.path}{why}, prompt {last_call.prompt_tokens}, new {last_call.new_tokens},"
        f" region steps {last_call.region_steps}, eager steps {last_call.eager_steps}"
    )
