"""Tests of DeepSpeed's real containers, with a transformers that they work with: `make test-kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers.cache_utils

from hepatch import attachments
from hepatch.backends import ownership
from tests.agreement import Actor
from tests.kernels import fallbacks, families

# Where transformers has caches that the native backend can use, containers are not admitted and nothing here would run;
# asked for alone, such a run then ends with "no tests ran", which is a failure.
collect_ignore_glob = ["test_*.py"] if hasattr(transformers.cache_utils, "CacheLayerMixin") else []


@pytest.fixture(autouse=True, scope="session")
def real_containers() -> None:
    """DeepSpeed's torch fallbacks, which make its containers run without a GPU."""
    fallbacks.install()


@pytest.fixture
def build() -> Iterator[Callable[..., Actor]]:
    """Builds engines whose containers were admitted; one at a time has them, so each is let go at the end."""
    built: list[Actor] = []

    def build(family: str = "opt", expect: str = "kernels", seed: int = 0, **engine_arguments: Any) -> Actor:
        actor = Actor(families.build(family, seed), **engine_arguments)
        built.append(actor)
        backend = actor.report.backend
        assert backend == expect, (backend, ownership.obstacle_of(actor.engine), actor.report.refusals)
        return actor

    yield build
    for actor in built:
        attachment = attachments.of_model(actor.model)
        if attachment is not None:
            attachment.suspend()
            attachments.forget(attachment)
    built.clear()
    # An engine that is not collected yet would keep the containers from the next test's.
    ownership._owner = None
    ownership.kernel_probes.set_class_state(ownership.kernel_probes.fresh_class_state())
    torch._dynamo.reset()
