"""What a call tells those who look: one log line at info level, named ranges for profilers, and nothing otherwise."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from hepatch import ranges, settings
from hepatch.report import logger
from tests import engines

LINE = re.compile(
    r"hepatch: generate LlamaForCausalLM: (?P<path>\w+)(?: \((?P<why>.*)\))?, (?P<rows>\d+) x \((?P<prompt>\d+) \+"
    r" (?P<new>\d+)\) tokens, (?P<ms>[\d.]+) ms, (?P<step>[\d.]+) ms per step with the prompt's,"
    r" recordings (?P<recordings>\d+), compilations (?P<compilations>\d+)"
)


@pytest.fixture(scope="module")
def engine() -> Any:
    return engines.build_engine(engines.build_model("llama"))


def generate(engine: Any, **more: Any) -> torch.Tensor:
    arguments = {**engines.prompts(2, 7), "max_new_tokens": 5, "do_sample": False, "pad_token_id": engines.PAD}
    tokens: torch.Tensor = engine.generate(**{**arguments, **more})
    return tokens


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The messages of the logger at info level."""
    level = logger.level
    caplog.set_level(logging.INFO, logger="hepatch")
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    logger.setLevel(level)


def test_a_call_through_a_region_costs_one_line(engine: Any, lines: Any) -> None:
    """Path, sizes, times and what was recorded; the second call compiles nothing."""
    engine.eval()
    for _ in range(2):
        generate(engine)

    first, second = (LINE.fullmatch(line) for line in lines())
    assert first is not None
    assert second is not None
    assert ("fused", "2", "7", "5") == second.group("path", "rows", "prompt", "new")
    assert ("1", "0") == (first["compilations"], second["compilations"])
    assert float(second["step"]) == pytest.approx(float(second["ms"]) / 5, abs=0.02)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"use_cache": False}], ids=["watched loop", "refused call"])
def test_an_eager_call_says_why_in_its_line(engine: Any, lines: Any, how: dict[str, Any]) -> None:
    engine.eval()
    generate(engine, **how)

    (line,) = lines()
    found = LINE.fullmatch(line)
    assert found is not None
    assert "eager" == found["path"]
    assert "[decode-mode]" in found["why"]


def test_nothing_is_logged_below_info(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine.eval()
    caplog.set_level(logging.WARNING, logger="hepatch")

    generate(engine)

    assert [] == caplog.records


def test_a_profiler_sees_prompt_and_steps_by_region_and_key(engine: Any) -> None:
    """One range for the prompt, one for each decode step, each named by the sizes it was recorded for."""
    engine.eval()
    generate(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(engine)

    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("hepatch::")}
    named = {key: count for key, count in counts.items() if "[" in key}
    assert 1 == named.pop("hepatch::prefill[rows=2,prompt=7]")
    ((name, count),) = named.items()
    assert re.fullmatch(r"hepatch::decode_step_\d+\[rows=2,window=128\]", name)
    assert 4 == count


def test_without_a_profiler_no_range_is_made(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path is the region's own method, unwrapped."""

    def forbidden(name: str) -> Any:
        raise AssertionError(f"a range {name} nobody looks at")

    monkeypatch.setattr(torch.profiler, "record_function", forbidden)
    monkeypatch.setattr(torch.cuda.nvtx, "range", forbidden)
    engine.eval()

    assert 12 == generate(engine).shape[1]


def test_nsight_is_known_by_what_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that was attached from outside has nobody to call torch.profiler for it."""
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert not settings.nvtx_tool()
    assert ranges._range() is None

    monkeypatch.setenv("NVTX_INJECTION64_PATH", "libToolsInjection64.so")
    assert settings.nvtx_tool()
    assert (ranges._range() is None) is not torch.cuda.is_available()
