"""Comparing greedy answers: equal, or parted at a tie that the dtype cannot decide, with the margin shown."""

from __future__ import annotations

import copy
import sys

import torch

from tests.engines import PAD


def show(text):
    """Put a measurement into the test's captured output."""
    sys.stdout.write(f"{text}\n")


def reference(oracle, prompt, arguments):
    """The oracle's own answer to `prompt` on its device, int64 `[batch, prompt + new]`."""
    with torch.no_grad():
        return oracle.generate(**prompt, do_sample=False, pad_token_id=PAD, **arguments)


def _logits(model, ids, mask):
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        more = {"position_ids": positions} if "position_ids" in model.forward.__code__.co_varnames else {}
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits.double()


def partings(oracle, prompt, expected, actual):
    """First difference of each row: (row, step, float64 margin of the two tokens, the dtype's noise there)."""
    width = prompt["input_ids"].shape[1]
    if expected.shape != actual.shape:
        columns = min(expected.shape[1], actual.shape[1])
        expected, actual = expected[:, :columns], actual[:, :columns]
    differing = (expected != actual).any(1).nonzero().flatten().tolist()
    if not differing:
        return []
    exact = copy.deepcopy(oracle).double()
    found = []
    for row in differing:
        step = int((expected[row] != actual[row]).nonzero()[0])
        ids = expected[row : row + 1, :step]
        mask = torch.cat((prompt["attention_mask"][row : row + 1], ids.new_ones(1, step - width)), 1)
        truth = _logits(exact, ids, mask)[0, -1]
        noise = float((_logits(oracle, ids, mask)[0, -1] - truth).abs().max())
        margin = float((truth[expected[row, step]] - truth[actual[row, step]]).abs())
        found.append((row, step - width, margin, noise))
    return found


def assert_agree(oracle, prompt, expected, actual, label=""):
    """Fail unless both are equal or every row parts at a margin of at most twice the noise; show the margins."""
    if torch.equal(expected, actual):
        return
    parted = partings(oracle, prompt, expected, actual)
    shown = "; ".join(f"row {r} step {s}: margin {m:.2e}, noise {n:.2e}" for r, s, m, n in parted)
    show(f"{label}: parted at ties: {shown}")
    assert parted, f"{label}: shapes {tuple(expected.shape)} and {tuple(actual.shape)}"
    assert all(margin <= 2 * noise for _, _, margin, noise in parted), f"{label}: {shown}"
