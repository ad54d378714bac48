"""Which pairs of releases are run: the cells of the matrix.

Not the full product. Every release stands in at least two cells, the four corners are there, and so is each pair that
stock answers differently from its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = "newest"
"""In place of a version: whatever the package index has last."""

TORCH = "2.13.0"
NEWEST_TORCH = "2.14.1"
"""The newest that was there to install when the results were made; a cell of its own, on the newest pair."""


@dataclass(frozen=True, order=True)
class Pair:
    """Versions of one cell, as a package index spells them."""

    deepspeed: str
    transformers: str
    torch: str = TORCH

    @property
    def name(self) -> str:
        """The cell's name, in sessions, results and the README."""
        named = f"deepspeed-{self.deepspeed}-transformers-{self.transformers}"
        return named if self.torch == TORCH else f"{named}-torch-{self.torch}"


PAIRS = (
    Pair("0.16.9", "4.44.2"),
    Pair("0.16.9", "4.48.3"),
    Pair("0.16.9", "5.24.0"),
    Pair("0.17.6", "4.48.3"),
    Pair("0.17.6", "4.57.6"),
    Pair("0.17.6", "5.17.0"),
    Pair("0.18.9", "4.44.2"),
    Pair("0.18.9", "4.57.6"),
    Pair("0.18.9", "5.0.0"),
    Pair("0.19.8", "4.44.2"),
    Pair("0.19.8", "4.48.3"),
    Pair("0.19.8", "4.57.6"),
    Pair("0.19.8", "5.0.0"),
    Pair("0.19.8", "5.17.0"),
    Pair("0.19.8", "5.24.0"),
    Pair("0.19.8", "5.24.0", NEWEST_TORCH),
)
"""Every cell whose versions are fixed."""

NEWEST_PAIR = Pair(NEWEST, NEWEST)
"""The cell that moves with the package index; while it is one of `PAIRS` there is nothing to run."""

IN_CI = (Pair("0.16.9", "4.44.2"), Pair("0.19.8", "5.24.0"))
"""What every run of CI covers: the oldest pair, which decodes eagerly, and the newest, which decodes natively."""

WITH_CONTAINERS = (Pair("0.19.8", "4.48.3"), Pair("0.17.6", "4.48.3"))
"""Pairs for whose OPT and Llama DeepSpeed's containers are admitted; CI covers the first."""

_HUB_1 = {"huggingface_hub": "1.33.0", "httpx": "0.28.1", "httpcore": "1.0.9"}
COMPANIONS = {
    "4.44.2": {"huggingface_hub": "0.36.0", "tokenizers": "0.19.1"},
    "4.48.3": {"huggingface_hub": "0.36.0", "tokenizers": "0.21.4"},
    "4.57.6": {"huggingface_hub": "0.36.0", "tokenizers": "0.22.2"},
    "5.0.0": {**_HUB_1, "tokenizers": "0.22.2"},
    "5.17.0": _HUB_1,
}
"""What a transformers release needs beside itself, where the installed one does not satisfy it.

Source: ``transformers/dependency_versions_table.py`` of each release, which is checked when it is imported.
"""
