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
    yield from _section("capabilities")
    for one in found.capabilities:
        word, style = {True: ("yes", "green"), False: ("no", "yellow"), None: ("?", "dim")}[one.present]
        yield _join(f"  {word:<4} {one.name}: {one.detail}", one.meaning), style
    yield from _section("settings")
    for name, value in found.settings.items():
        yield f"  {name}={value}", ""
    if not found.settings:
        yield "  all at their defaults", ""
    yield from _section("patches")
    for patch in found.patches:
        yield (
            _join(f"  {'ok' if patch.works else 'no':<4} {patch.name}: {patch.state}", patch.remedy),
            ("green" if patch.works else "yellow"),
        )
    if found.hook_traceback is not None:
        yield "  traceback of the failed hook:", "red"
        yield from ((f"    {line}", "red") for line in found.hook_traceback.rstrip().splitlines())
    if found.guards:
        yield from _section(f"guards, for ds_config {found.given['ds_config']}, model {found.given['model']}")
    for guard in found.guards:
        text = f"  {guard.outcome:<4} {guard.rule}"
        if guard.reason:
            text += f": {guard.reason}"
        yield _join(text, guard.remedy), _OUTCOME_STYLE[guard.outcome]
    if found.stock:
        yield from _section("without hepatch")
        yield from ((f"  {line}", "") for line in found.stock)
    if found.self_test:
        yield from _section("self-test: a tiny engine against the model's plain forward")
        for check in found.self_test:
            yield (
                f"  {'ok' if check.passed else 'FAIL':<4} {check.name}: {check.detail}",
                ("green" if check.passed else "red"),
            )
        yield from ((f"       {line}", "dim") for line in (found.self_test_report or "").splitlines()[1:6])
    for problem in found.problems:
        yield f"problem: {problem}", "red"
    yield f"verdict: {found.summary} (exit {int(found.verdict)})", "bold"


def _section(title: str) -> Iterator[Line]:
    yield f"{title}:", "bold"


def _join(text: str, more: str) -> str:
    return f"{text}. {more[0].upper()}{more[1:]}." if more else text
