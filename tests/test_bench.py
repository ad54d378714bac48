"""`hepatch bench`: a real run on the CPU, what its rows may claim, and the table, Markdown, JSON and picture of it."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hepatch.bench import floor, picture, presets, rows, tables
from hepatch.bench.client import last_line, without_folders
from hepatch.bench.run import SystemRun
from hepatch.bench.shapes import SHAPES
from hepatch.bench.systems import SYSTEMS
from hepatch.bench.workload import Workload, build_batch, build_model, end_tokens, live_tokens, model_config
from hepatch.commands import app

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """The command as a user gives it, with the cheap compiler; what it printed and its JSON."""
    files = ["--json", "result.json", "--markdown", "result.md", "--picture", "result.png"]
    done = subprocess.run(
        [sys.executable, "-m", "hepatch", "bench", *options, *files],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "240",
            "OMP_NUM_THREADS": "1",
            "HEPATCH_COMPILE_BACKEND": "eager",
            "HEPATCH": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("bench")
    printed, result = run(folder, "--tiny", "--device", "cpu", "--rounds", "2", "--iterations", "1")
    return printed, result, folder


@pytest.fixture
def result(tiny: tuple[str, dict[str, Any], Path]) -> dict[str, Any]:
    return copy.deepcopy(tiny[1])


def row(result: dict[str, Any], system: str, batch: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in result["rows"] if one["system"] == system and one["batch"] == batch)
    return found


@pytest.mark.parametrize(
    "command",
    [("hepatch", "bench", "--json", "result.json"), ("benchmarks.record", "seed", "long", "--out", ".", "--")],
    ids=["bench", "record"],
)
def test_a_run_that_is_ended_early_keeps_what_it_has(tmp_path: Path, command: tuple[str, ...]) -> None:
    """As `timeout` ends it, with a signal to the process and one to its group: what was measured is not lost."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", *command),
            *("--tiny", "--device", "cpu", "--system", "static-cache", "--rounds", "1000"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as printed:
        for line in printed:
            if "round 2 of" in line:
                process.terminate()
                os.killpg(process.pid, signal.SIGTERM)
                break
        rest = printed.read()
    assert 130 == process.wait(timeout=60)
    # One: the workload that would have come next was not begun.
    (kept,) = tmp_path.glob("*.json")
    result = json.loads(kept.read_text())

    assert result["interrupted"]
    assert "Interrupted" in rest
    assert row(result, "static-cache", 3)["generate_ms"] > 0
    assert "not reached" in row(result, "static-cache", 2)["failure"]


def test_every_system_has_a_row_for_every_batch(result: dict[str, Any]) -> None:
    assert [(name, batch) for batch in (2, 3) for name in SYSTEMS] == [
        (one["system"], one["batch"]) for one in result["rows"]
    ]


def test_systems_run_on_the_same_weights_and_say_the_same(result: dict[str, Any]) -> None:
    """In float32 no two kernels may differ by a token."""
    assert result["weights_equal"]
    assert "unpatched" == result["reference"]
    for one in result["rows"]:
        if one["failure"] is None:
            assert one["tokens_equal"] == one["tokens_total"] == 12 * one["batch"]


def test_a_row_has_what_was_asked_for(result: dict[str, Any]) -> None:
    native = row(result, "native")

    assert native["failure"] is None
    for field in ("generate_ms", "ms_per_step", "tokens_per_s", "train_ms", "iteration_ms", "gb_per_s"):
        assert native[field] > 0
    assert 2 == native["generate_spread_ms"]["repeats"]
    assert 0 < native["share_of_floor"] < 1
    assert native["floor_ms_per_step"] == result["floor_ms_per_step"]["3"]
    assert native["first_call_s"] >= native["compile_s"] > 0


def test_hepatch_ran_in_regions_and_the_others_without_it(result: dict[str, Any]) -> None:
    """No call fell back; a system beside hepatch would have ended its process had a patch of ours been in force."""
    native = row(result, "native")

    assert [] == native["fallbacks"]
    assert native["note"].startswith("native: 1 compilations")
    assert native["speed_up"] == pytest.approx(
        row(result, "unpatched")["generate_ms"] / native["generate_ms"], abs=0.01
    )


def test_a_system_that_is_not_served_is_a_row_that_says_why(tiny: tuple[str, dict[str, Any], Path]) -> None:
    """Whether the kernels backend runs is for its own tests; where it does not, its row holds the refusal."""
    printed, result, _ = tiny
    for one in result["rows"]:
        if one["failure"] is not None:
            assert "speed_up" not in one
            assert one["failure"].split(":")[0] in printed
            assert any(error["system"] == one["system"] for error in result["errors"])


def test_reports_name_no_folder_of_a_machine(tiny: tuple[str, dict[str, Any], Path]) -> None:
    _, result, folder = tiny
    assert [] == re.findall(r"/(?:home|root|tmp|usr|work|var|mnt)/", json.dumps(result))
    assert str(folder) not in (folder / "result.md").read_text()


def test_markdown_has_the_rows_of_the_table(tiny: tuple[str, dict[str, Any], Path]) -> None:
    printed, result, folder = tiny
    lines = [line for line in (folder / "result.md").read_text().splitlines() if line.startswith("| ")]

    assert len(lines) == 1 + len(result["rows"])
    assert "hepatch native" in printed
    assert "Command: hepatch bench --tiny --device cpu --rounds 2 --iterations 1" in printed


def test_the_picture_is_a_picture(tiny: tuple[str, dict[str, Any], Path]) -> None:
    """That it can be read was looked at; here it is of a size and not empty."""
    from matplotlib import image

    pixels = image.imread(tiny[2] / "result.png")

    assert (780, 1950) == pixels.shape[:2]
    assert pixels[..., :3].std() > 0.1


def test_a_picture_of_one_batch_still_has_a_floor(result: dict[str, Any], tmp_path: Path) -> None:
    result["rows"] = [one for one in result["rows"] if one["batch"] == 3]
    result["floor_ms_per_step"] = {"3": result["floor_ms_per_step"]["3"]}

    picture.draw(result, tmp_path / "one.svg")

    assert (tmp_path / "one.svg").stat().st_size > 10_000


def test_a_picture_has_room_for_a_last_system_that_failed(result: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    row(result, "native")["failure"] = "refused"
    axes = Figure().subplots()

    picture._generate(axes, [one for one in result["rows"] if one["failure"] is None], result)

    low, high = axes.get_ylim()
    assert low < min(axes.get_yticks()) - 0.3
    assert high > max(axes.get_yticks()) + 0.3


def measured(**more: Any) -> SystemRun:
    """A system as a run leaves it, with one batch of two rows measured."""
    calls = {
        "columns": 4,
        "live_tokens": 8,
        "tokens_equal": 8,
        "tokens_total": 8,
        "generate_times_ms": [10.0, 11.0, 12.0],
        "prefill_times_ms": [2.0, 2.0, 2.0],
        **more,
    }
    return SystemRun(facts={"weight_bytes_per_step": 10**6, "kv_bytes_per_token": 100}, calls={2: calls})


def finished(**native: Any) -> dict[str, Any]:
    workload = Workload("tiny", batches=(2,), prompt_tokens=8, new_tokens=4)
    systems = {"unpatched": measured(generate_times_ms=[44.0] * 3), "native": measured(**native)}
    facts = {"copy_gb_per_s": 1.0, "machine": {"device": "cpu", "cpu_cores": 2, "architecture": "x"}, "versions": {}}
    shown = {"workload": {**vars(workload)}, "command": "hepatch bench", "reference": "unpatched"}
    return rows.finish({**facts, **shown}, workload, systems)


def test_time_per_step_is_the_call_less_its_prompt() -> None:
    native = finished()["rows"][1]

    assert (3.0, 4.0) == (native["ms_per_step"], native["speed_up"])
    assert native["floor_ms_per_step"] == pytest.approx((10**6 + 100 * (16 + 4)) / 1e6)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"fallbacks": ["eager: [hooks] a hook"]}, "1 calls fell back: eager: [hooks] a hook"),
        ({"tokens_equal": 7, "all_differences_are_ties": False}, "tokens differ by more than rounding explains"),
        ({"tokens_equal": 7, "all_differences_are_ties": None}, "tokens differ by more than rounding explains"),
    ],
)
def test_a_row_that_fell_back_or_differs_claims_nothing(what: dict[str, Any], words: str) -> None:
    result = finished(**what)
    native = result["rows"][1]

    assert "speed_up" not in native
    assert words == native["no_claim"]
    console = Console(file=io.StringIO(), width=300)
    console.print(*tables.rich_tables({**result, "weights_equal": True}))
    assert words.split(":", maxsplit=1)[0] in console.file.getvalue()  # type: ignore[attr-defined]


def test_ties_of_half_precision_are_no_reason_to_claim_nothing() -> None:
    assert 4.0 == finished(tokens_equal=7, all_differences_are_ties=True)["rows"][1]["speed_up"]


def test_what_a_step_reads_leaves_out_tables_of_which_it_reads_a_row() -> None:
    """A table that is the output projection too is read whole."""
    model = build_model(Workload("tiny"), "cpu", torch.float32)
    table = model.get_input_embeddings().weight

    everything = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert everything - 4 * table.numel() == floor.weight_bytes(model)
    model.lm_head.weight = table
    assert everything - 4 * table.numel() == floor.weight_bytes(model)


def test_rows_of_a_variable_workload_are_padded_on_the_left() -> None:
    workload = Workload("tiny", batches=(5,), prompt_tokens=20, shortest_prompt=4, new_tokens=4)
    batch = build_batch(workload, 512, "cpu", 5)

    lengths = batch.mask.sum(1).tolist()
    assert workload.prompt_lengths(5) == lengths
    assert 20 == lengths[0]
    assert all(4 <= length <= 20 for length in lengths)
    assert len(set(lengths)) > 2
    assert bool((batch.mask.diff(dim=1) >= 0).all())
    assert bool((batch.ids[batch.mask == 0] == 1).all())


def test_rows_end_at_steps_spread_over_their_answers() -> None:
    """Also where rows share most of their tokens, so that one row's end would be another's beginning."""
    draw = random.Random(1)
    answers = [
        [draw.choice((7, 8, 9)) if draw.random() < 0.5 else draw.randrange(99) for _ in range(80)] for _ in "8" * 8
    ]
    ends = end_tokens(Workload("tiny"), answers)
    lengths = sorted(live_tokens([row], ends) for row in answers)

    assert not set(ends) & {7, 8, 9}
    assert lengths[0] < 40 < lengths[-1]
    assert len(set(lengths)) > 4
    assert 640 == live_tokens(answers, ())


def test_an_end_token_is_found_for_a_row_that_repeats_one() -> None:
    assert (9,) == end_tokens(Workload("tiny"), [[9] * 5])


def test_random_weights_give_answers_that_vary() -> None:
    """A model that repeats one token would hide a wrong position, and rows could not end at different steps."""
    workload = Workload("tiny", dtype="fp32", batches=(3,), prompt_tokens=12, new_tokens=24)
    model = build_model(workload, "cpu", torch.float32)
    batch = build_batch(workload, 512, "cpu", 3)
    tokens = model.generate(batch.ids, attention_mask=batch.mask, max_new_tokens=24, min_new_tokens=24, do_sample=False)

    assert all(len(set(answer)) > 8 for answer in tokens[:, 12:].tolist())


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_size_of_its_name(name: str) -> None:
    """Counted without memory: millions of parameters, as published."""
    from transformers import AutoModelForCausalLM

    expected = {"opt-125m": 125, "opt-1.3b": 1316, "llama-1b": 1236, "qwen2-0.5b": 494, "smollm2": 135, "tiny": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name))

    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert counted == pytest.approx(expected[name], abs=1.0)


@pytest.mark.parametrize("name", ["seed", "long", "variable"])
def test_recorded_workloads_fit_their_model(name: str) -> None:
    presets.check(presets.preset(name, Workload("opt-1.3b", dtype="fp32")), "cpu", tuple(SYSTEMS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "absent"], "absent is no shape"),
        (["--dtype", "int8"], "--dtype int8 is none of fp16, bf16, fp32"),
        (["--system", "vllm"], "--system vllm is none of"),
        (["--workload", "short"], "--workload short is none of seed, long, variable"),
        (["--device", "tpu"], "--device tpu is neither cuda nor cpu"),
        (["--device", "cpu", "--dtype", "fp16"], "DeepSpeed refuses fp16 on most CPUs"),
        (["--model", "opt-125m", "--prompt", "2000", "--new", "100"], "come to 2100 and opt-125m has 2048 positions"),
        (["--shortest-prompt", "300"], "--shortest-prompt 300 is longer than --prompt 256"),
        (["--json", "absent/result.json"], "there is no folder absent"),
    ],
)
def test_bad_input_costs_one_line_and_starts_nothing(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *options], env={"COLUMNS": "200"})

    assert 2 == done.exit_code, done.output
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_traceback_is_told_in_the_line_that_names_the_error() -> None:
    text = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nRuntimeError: it broke\n  see there\n'

    assert "RuntimeError: it broke" == last_line(text)
    assert "no message" == last_line("\n")


def test_a_traceback_in_a_result_has_names_of_files_alone() -> None:
    text = 'File "/home/me/venv/lib/torch/x.py", line 1; see https://a.org/b/c and and/or'

    assert 'File "x.py", line 1; see https://a.org/b/c and and/or' == without_folders(text)


def test_a_model_folder_with_ends_and_paddings_runs(tmp_path: Path) -> None:
    """The weights of a folder; rows end at steps of their own, in the region as in the unpatched engine."""
    build_model(Workload("tiny"), "cpu", torch.float32).save_pretrained(tmp_path / "model")
    sizes = ["--model", str(tmp_path / "model"), "--batch", "3", "--prompt", "24", "--new", "12"]
    ends = ["--early-ends", "--shortest-prompt", "5", "--device", "cpu"]

    systems = ["--system", "unpatched", "--system", "native"]
    _, result = run(tmp_path, *sizes, *ends, *systems, "--rounds", "1", "--iterations", "0")

    native = row(result, "native")
    assert native["failure"] is None
    assert native["tokens_equal"] == native["tokens_total"]
    assert [] == native["fallbacks"]
    least, _, most = result["answer_lengths"]["3"]
    assert least < most
    assert native["live_tokens"] < 3 * 12
    assert "model" == result["workload"]["model"]
    assert str(tmp_path) not in json.dumps(result)
