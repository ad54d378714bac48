"""What a case comes to: the three sides' answers compared, from `matrix.rollouts` to one entry of the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matrix.hosts import ROOT

SCORE_TOLERANCE = 2e-3
"""Between scores in float32 that are computed in another order."""

Answer = dict[str, Any]


def compared(oracle: Answer, stock: Answer, ours: Answer) -> Answer:
    """What is kept of a case: stock's outcome, hepatch's, and what is wrong with it.

    Args:
        oracle: what `rollouts.plain` gave, as a child's answer.
        stock: what `rollouts.stock` gave.
        ours: what `rollouts.patched` gave.
    """
    if "error" in oracle:
        return {"stock": "?", "hepatch": "?", "wrong": [f"the oracle failed: {_line(oracle)}"]}
    truth = oracle["result"]
    judged: Answer = {"stock": _stock_outcome(truth, stock)}
    if "error" in ours:
        return {**judged, "hepatch": f"fails: {_line(ours)}", "wrong": [f"fails with hepatch: {_line(ours)}"]}
    got = ours["result"]
    path = got["greedy path"]
    judged["hepatch"] = "native" if path["path"] == "fused" else f"eager: {path['reason']}"
    judged["wrong"] = [*_other_answers(truth, got), *_other_conduct(truth, stock.get("result", {}), got)]
    return judged


def _other_answers(truth: Answer, got: Answer) -> Iterator[str]:
    """Where tokens and scores are not the oracle's."""
    if got["engine.generate"] != truth["before"]["greedy"]:
        yield "engine.generate: other tokens than the oracle's"
    if "after" not in truth:
        yield "the weights after the optimizer's step were not handed over"
    elif truth["after"]["greedy"] == truth["before"]["greedy"]:
        yield "the optimizer's step did not change the tokens, so nothing was shown"
    for when in ("before", "after"):
        for name, expected in truth.get(when, {}).items():
            if not _same(expected, got[when][name]):
                yield f"{name}, {when} the optimizer's step: not what the oracle gives"


def _other_conduct(truth: Answer, stock: Answer, got: Answer) -> Iterator[str]:
    """Where weights, loss, a cache or the path are not what they should be."""
    if got["weights"] != truth["weights"]:
        yield "initialize changed the weights"
    if got["cache"] != truth["cache"]:
        yield f"a KV cache of the caller's holds {got['cache']} tokens after generate instead of {truth['cache']}"
    if got["greedy path"] != got["greedy path after"]:
        yield f"the path changed with the optimizer's step: {got['greedy path after']}"
    if got["path"]["failures"] or got["path"]["recoveries"]:
        yield f"a region failed: {got['path']['failures']}"
    loss = stock.get("train", {}).get("result")
    if loss is not None and loss != got["loss"]:
        yield f"the loss of the step is {got['loss']!r} and stock's {loss!r}"


def _same(expected: Any, got: Any) -> bool:
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(_same(expected[name], got[name]) for name in expected)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(_same, expected, got))
    if isinstance(expected, float) and isinstance(got, float):
        return abs(expected - got) <= SCORE_TOLERANCE
    return bool(expected == got)


def _stock_outcome(truth: Answer, stock: Answer) -> str:
    """The first thing that goes wrong without hepatch, or "works"."""
    if "error" in stock:
        return f"dies: {_line(stock)}"
    for step, outcome in stock["result"].items():
        if "error" in outcome:
            return f"{step}: {_line(outcome)}"
        if step == "initialize" and outcome["result"] != truth["weights"]:
            return "initialize: damages the weights"
        if step.endswith("generate") and outcome["result"] != truth["before"]["greedy"]:
            return f"{step}: wrong tokens"
    return "works"


def _line(error: Answer) -> str:
    first = (error["message"].strip().splitlines() or [""])[0]
    return f"{error['error']}: {first}".replace(str(ROOT), ".")
