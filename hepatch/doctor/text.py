"""A diagnosis as a block of lines that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterator

from hepatch.doctor.findings import Diagnosis

Line = tuple[str, str]
"""What is printed, and rich's style of it."""

_OUTCOME_STYLE = {"pass": "green", "fail": "red", "open": "dim"}


def lines(found: Diagnosis) -> Iterator[Line]:
    """The block, line by line."""
    yield "hepatch doctor", "bold"
    yield " · ".join(f"{name} {version}" for name, version in found.versions.items()), ""
    yield from _capabilities(found)
    yield from _patches(found)
    yield from _guards(found)
    yield from _self_test(found)
    yield from ((f"problem: {problem}", "red") for problem in found.problems)
    yield f"verdict: {found.summary} (exit {int(found.verdict)})", "bold"


def _capabilities(found: Diagnosis) -> Iterator[Line]:
    yield "capabilities:", "bold"
    for one in found.capabilities:
        word, style = {True: ("yes", "green"), False: ("no", "yellow"), None: ("?", "dim")}[one.present]
        yield _join(f"  {word:<4} {one.name}: {one.detail}", one.meaning), style
    yield "settings:", "bold"
    yield from ((f"  {name}={value}", "") for name, value in found.settings.items())
    if not found.settings:
        yield "  all at their defaults", ""


def _patches(found: Diagnosis) -> Iterator[Line]:
    yield "patches:", "bold"
    for patch in found.patches:
        word, style = ("ok", "green") if patch.works else ("no", "yellow")
        yield _join(f"  {word:<4} {patch.name}: {patch.state}", patch.remedy), style
    if found.hook_traceback is not None:
        yield "  traceback of the failed hook:", "red"
        yield from ((f"    {line}", "red") for line in found.hook_traceback.rstrip().splitlines())


def _guards(found: Diagnosis) -> Iterator[Line]:
    if found.guards:
        yield f"guards, for ds_config {found.given['ds_config']}, model {found.given['model']}:", "bold"
    for guard in found.guards:
        reason = f": {guard.reason}" if guard.reason else ""
        yield _join(f"  {guard.outcome:<4} {guard.rule}{reason}", guard.remedy), _OUTCOME_STYLE[guard.outcome]
    if found.stock:
        yield "without hepatch:", "bold"
    yield from ((f"  {line}", "") for line in found.stock)


def _self_test(found: Diagnosis) -> Iterator[Line]:
    if not found.self_test:
        return
    yield "self-test, a tiny engine against the model's plain forward:", "bold"
    for check in found.self_test:
        word, style = ("ok", "green") if check.passed else ("FAIL", "red")
        yield f"  {word:<4} {check.name}: {check.detail}", style
    # Versions come first in a report and stand above already, patches come last.
    report = (found.self_test_report or "").splitlines()[1:]
    yield from ((f"       {line}", "dim") for line in report if not line.startswith("patch "))


def _join(text: str, more: str) -> str:
    return f"{text}. {more[0].upper()}{more[1:]}." if more else text
