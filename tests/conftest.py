"""Fixtures of every test: a clean hepatch before and after, a cheap compiler, one thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import pytest
import torch

import hepatch
from hepatch import attachments

_done: weakref.WeakSet[attachments.Attachment] = weakref.WeakSet()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of this suite, and start from an environment that says nothing but the cheap compiler."""
    for variable in [name for name in os.environ if name == "HEPATCH" or name.startswith("HEPATCH_")]:
        del os.environ[variable]
    # For the whole session: engines of module fixtures are built before the fixtures of a test run.
    os.environ["HEPATCH_COMPILE_BACKEND"] = "eager"
    config.addinivalue_line("markers", "inductor: compiles with Inductor itself instead of the cheap backend")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models on few cores: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cheap_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the compile backend of regions: `eager` (Dynamo only), or Inductor for tests marked `inductor`."""
    backend = "inductor" if request.node.get_closest_marker("inductor") else "eager"
    monkeypatch.setenv("HEPATCH_COMPILE_BACKEND", backend)
    return backend


@pytest.fixture(autouse=True)
def clean_hepatch(cheap_backend: str) -> Iterator[None]:
    """Start each test with hepatch on; afterwards let go of the engines that it built.

    Engines of wider fixtures, which exist before this one runs, keep their regions from test to test.
    """
    hepatch.enable()
    wider = {attachment for attachment in attachments.live() if attachment not in _done}
    yield
    own = [attachment for attachment in attachments.live() if attachment not in wider and attachment not in _done]
    for attachment in own:
        attachment.suspend()
        _done.add(attachment)
    if own and not wider:
        # Compiled code of one test must not count against another one's limits.
        torch._dynamo.reset()
    hepatch.enable()
