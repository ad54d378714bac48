"""Fixtures of every test: a clean hepatch before and after, a cheap compiler, one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hepatch


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of this suite."""
    config.addinivalue_line("markers", "inductor: compiles with Inductor itself instead of the cheap backend")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models on few cores: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cheap_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the compile backend of regions: `eager` (Dynamo only), or Inductor for tests marked `inductor`."""
    backend = "inductor" if request.node.get_closest_marker("inductor") else "eager"
    for variable in ("HEPATCH", "HEPATCH_BACKEND", "HEPATCH_STRICT", "HEPATCH_LOG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", backend)
    return backend


@pytest.fixture(autouse=True)
def clean_hepatch(cheap_backend: str) -> Iterator[None]:
    """Start each test with hepatch on and no engine attached, and leave nothing of the test's engines behind."""
    hepatch.enable()
    yield
    _let_go()
    hepatch.enable()


def _let_go() -> None:
    from hepatch import attachments

    compiled = False
    for attachment in attachments.live():
        compiled = True
        attachment.suspend()
        attachments.forget(attachment)
    if compiled:
        # Compiled code of one test must not count against another one's recompile limit.
        torch._dynamo.reset()
