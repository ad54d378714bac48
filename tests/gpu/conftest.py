"""Device tests, skipped without a CUDA device; `HEPATCH_GPU_TESTS=cpu` tries the tests' own code on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# cuBLAS reads it when its first handle is made, and deterministic algorithms are refused without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ON_CPU = os.environ.get("HEPATCH_GPU_TESTS") == "cpu"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of these tests."""
    config.addinivalue_line("markers", "more_families: architectures beyond the four that a short device run covers")
    config.addinivalue_line("markers", "graphs: about CUDA graphs themselves, so nothing is left of it on a CPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real Inductor for every test here; a reason for each one that cannot run."""
    folder = Path(__file__).parent
    for item in items:
        if folder not in item.path.parents:
            continue
        item.add_marker("gpu")
        if torch.cuda.is_available():
            item.add_marker("inductor")
        elif not ON_CPU:
            item.add_marker(
                pytest.mark.skip(reason="no CUDA device: CUDA graphs and device kernels are what is tested")
            )
        elif item.get_closest_marker("graphs"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device: this test is about CUDA graphs alone"))


@pytest.fixture
def device() -> str:
    """Where the tests run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
