"""What the doctor finds, as plain data, and the verdict that its exit status gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class Verdict(IntEnum):
    """The exit status: a region would run, everything stays eager, or something is broken."""

    REGION = 0
    EAGER = 1
    BROKEN = 2


@dataclass(frozen=True)
class Capability:
    """One thing that is there or not.

    Attributes:
        name: "CUDA", "nvcc", "DeepSpeed inference op" and the like.
        present: whether it is there; None where that could not be looked up.
        detail: the version, or why not.
        meaning: what follows for hepatch, "" where nothing.
    """

    name: str
    present: bool | None
    detail: str
    meaning: str = ""


@dataclass(frozen=True)
class PatchState:
    """One patched attribute.

    Attributes:
        name: its qualified name.
        state: as `hepatch.report` has it.
        works: whether hepatch acts there.
        remedy: what to do, "" where nothing.
    """

    name: str
    state: str
    works: bool
    remedy: str = ""


@dataclass(frozen=True)
class Judgement:
    """One guard for the given configuration.

    Attributes:
        rule: its name.
        outcome: "pass", "fail", or "open": decided at each call, or only with a model at hand.
        reason: why it fails or is open, "" where it passes.
        remedy: what to do, "" where nothing.
    """

    rule: str
    outcome: str
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One comparison of the self-test."""

    name: str
    passed: bool
    detail: str


@dataclass
class Diagnosis:
    """Everything that the doctor found.

    Attributes:
        versions: of what is installed.
        capabilities: what the machine can do.
        patches: every patch and its state.
        settings: `HEPATCH_*` variables that differ from their default.
        given: the configuration and model that were judged, in words.
        guards: every guard's judgement.
        backend: what would serve a plain generate: "native", "kernels" or "none".
        stock: what DeepSpeed and transformers would do without hepatch, one sentence each.
        problems: what is broken, one line each.
        hook_traceback: the traceback of what kept the patches off, None where nothing did.
        self_test: its comparisons; empty where it was not asked for.
        self_test_report: `hepatch.report` of its engine.
        self_test_refusals: rules that refused its calls; with no model given, the guards above could not know.
    """

    versions: dict[str, str] = field(default_factory=dict)
    capabilities: list[Capability] = field(default_factory=list)
    patches: list[PatchState] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    guards: list[Judgement] = field(default_factory=list)
    backend: str = "none"
    stock: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hook_traceback: str | None = None
    self_test: list[Check] = field(default_factory=list)
    self_test_report: str | None = None
    self_test_refusals: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """What the exit status says."""
        if self.problems or any(not check.passed for check in self.self_test):
            return Verdict.BROKEN
        if self._refused:
            return Verdict.EAGER
        return Verdict.REGION

    @property
    def _refused(self) -> list[str]:
        refused = [guard.rule for guard in self.guards if guard.outcome == "fail"]
        return refused or [f"{rule} (the self-test's engine)" for rule in self.self_test_refusals]

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        if self.verdict is Verdict.BROKEN:
            bad = [*self.problems, *(f"self-test: {check.name}" for check in self.self_test if not check.passed)]
            return f"broken: {bad[0]}"
        if self._refused:
            return f"eager: refused by {', '.join(self._refused)}"
        return f"a region would run ({self.backend})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `verdict`, `exit` and `summary` are added."""
        return {
            "verdict": self.verdict.name.lower(),
            "exit": int(self.verdict),
            "summary": self.summary,
            **asdict(self),
        }
