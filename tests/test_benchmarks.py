"""The recorded benchmark, what the README says of it, and the arithmetic between readings and fields. No GPU."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from benchmarks import mixed, record, seed_kernels, seed_native, summary
from hepatch.bench import memory, tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = RESULTS / "seed-native.json"
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULT = json.loads(RECORDED.read_text(encoding="utf-8"))


def reading(allocated: float, pool_reserved: float = 0.0, pool_allocated: float = 0.0) -> memory.Reading:
    return memory.Reading(
        allocated=allocated,
        reserved=2 * allocated,
        pool_reserved=pool_reserved,
        pool_allocated=pool_allocated,
        used=0.0,
    )


def calls(allocated: list[float], **others: list[float]) -> list[dict[str, float]]:
    """A trace of mixed calls: what is not given stays the same throughout."""
    steady = {"reserved_mib": 9.0, "graph_pool_mib": 9.0, "cache_mib": 9.0, "recordings": 9, "compilations": 9}
    trace = [{**steady, "allocated_mib": value} for value in allocated]
    for key, values in others.items():
        for call, value in zip(trace, values, strict=True):
            call[key] = value
    return trace


def test_the_result_has_what_was_asked_for() -> None:
    """The fields that issue 2 names."""
    assert set(RESULT["systems"]) == {"unpatched", "static-cache", "hepatch"}
    for system in RESULT["systems"].values():
        for field in ("generate_ms", "ms_per_step", "first_call_s", "extra_mib", "iteration_ms"):
            assert system[field] > 0
    assert RESULT["command"].startswith("python -m benchmarks.seed_native")
    assert "H200" in RESULT["machine"]["gpus"][0]
    assert {"python", "torch", "deepspeed", "transformers", "cuda", "hepatch"} <= set(RESULT["versions"])
    assert 0 < RESULT["tokens_equal"] <= RESULT["tokens_total"]
    assert RESULT["errors"] == []


def test_the_result_is_what_its_own_readings_say() -> None:
    """Deriving its fields again changes nothing, targets included."""
    for system in RESULT["systems"].values():
        derived = memory.between_calls(system["held_between_calls_mib"], system["kv_mib"])
        assert derived == {key: system[key] for key in derived}
    judged = mixed.judge(RESULT["mixed"]["trace"], RESULT["mixed"]["recoveries"])
    assert judged == {key: RESULT["mixed"][key] for key in judged}
    assert summary.targets(RESULT) == RESULT["targets"]


def test_every_target_is_printed_met_or_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that was missed is shown as missed."""
    out = tmp_path / "new" / "result.json"

    assert seed_native.conclude(copy.deepcopy(RESULT), out, {}) == 0

    printed = capsys.readouterr().out
    for target in RESULT["targets"]:
        assert f"{'met   ' if target['met'] else 'MISSED'} {target['name']}: {target['measured']}" in printed
    assert json.loads(out.read_text()) == RESULT


def test_the_readmes_table_is_the_result() -> None:
    found = re.search(r"<!-- seed-native table -->\n(.*?)\n<!-- /seed-native table -->", README, flags=re.DOTALL)

    assert found is not None
    assert summary.table(RESULT) == found[1].splitlines()


def test_the_readme_names_command_machine_and_versions_of_the_result() -> None:
    assert RESULT["command"] in README
    assert "One H200" in README
    for name in ("python", "torch", "deepspeed", "transformers"):
        assert RESULT["versions"][name] in README
    assert f"{RESULT['tokens_equal']} of {RESULT['tokens_total']} tokens" in README


def test_the_readmes_table_of_the_kernels_is_the_result() -> None:
    result = json.loads((RESULTS / "seed-kernels.json").read_text(encoding="utf-8"))
    found = re.search(r"<!-- seed-kernels table -->\n(.*?)\n<!-- /seed-kernels table -->", README, flags=re.DOTALL)

    assert found is not None
    assert seed_kernels.table(result) == found[1].splitlines()
    assert result["command"] in README


@pytest.mark.parametrize(
    ("name", "missed", "fields"),
    [
        ("seed-kernels", ["train step, slower by"], ("generate_ms", "iteration_ms", "train_ms")),
        ("seed-kernels-busy-host", ["first_call_s: compile, record, answer"], ("generate_ms", "train_ms")),
    ],
)
def test_the_readme_says_what_the_kernels_measured_and_missed(name: str, missed: list[str], fields: list[str]) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))

    assert seed_kernels.targets(result["rows"]) == result["targets"]
    assert missed == [target["name"] for target in result["targets"] if not target["met"]]
    for row in result["rows"]:
        for field in fields:
            if row["system"] in ("kernels", "unpatched"):
                assert f"{row[field]:.1f}" in README
    assert f"results/{name}.json" in README


@pytest.mark.parametrize("file", sorted(RESULTS.glob("bench-*.json")), ids=lambda file: file.stem)
def test_a_recorded_benchs_table_is_its_result(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))

    assert tables.markdown(result) == file.with_suffix(".md").read_text(encoding="utf-8")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "H200" in result["machine"]["gpus"][0]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_names_no_folder_of_a_machine(file: Path) -> None:
    text = file.read_text(encoding="utf-8")

    assert [] == re.findall(r"/(?:home|root|opt|tmp|usr|work|var|mnt)/", text)
    assert len(text) < 200_000


def test_the_readme_names_every_missed_target() -> None:
    missed = {target["name"]: target["measured"] for target in RESULT["targets"] if not target["met"]}
    told = README[README.index("**Missed:**") :].split("\n\n")[0]

    assert set(missed) == {"peak_extra_mib"}
    assert f"exceeded within one by {missed['peak_extra_mib'] - 132.0:.1f} MiB" in told


def test_memory_that_stays_is_counted_without_the_kv_cache() -> None:
    """A cache that is kept between calls is subtracted; what graph pools reserve and do not use is added."""
    found = memory.extra(reading(1000.0), reading(1650.0, pool_reserved=40.0, pool_allocated=10.0), 1750.0, 600.0)

    assert found["held_between_calls_mib"] == 680.0
    assert (found["kv_held_mib"], found["extra_mib"]) == (600.0, 80.0)
    assert found["peak_extra_mib"] == 180.0


def test_a_kv_cache_that_is_freed_is_not_subtracted_from_what_stays() -> None:
    """Less is held than the cache is large. The peak within a call had the cache all the same."""
    found = memory.extra(reading(1000.0), reading(1033.0), 1650.0, 600.0)

    assert (found["kv_held_mib"], found["extra_mib"]) == (0.0, 33.0)
    assert found["peak_extra_mib"] == 50.0


def test_memory_that_returns_to_an_earlier_level_is_flat() -> None:
    found = mixed.judge(calls([100, 165, 133, 100, 165, 166, 165, 165, 165]), recoveries=0)

    assert found["growth_after_first_third_mib"]["allocated_mib"] == 1
    assert found["flat"]


def test_reserved_memory_is_shown_and_not_judged() -> None:
    found = mixed.judge(calls([100] * 6, reserved_mib=[500, 500, 500, 900, 500, 500]), recoveries=0)

    assert found["growth_after_first_third_mib"]["reserved_mib"] == 400
    assert found["flat"]


@pytest.mark.parametrize(
    ("trace", "recoveries"),
    [
        (calls([100, 100, 100, 105, 100, 100]), 0),
        (calls([100] * 6, graph_pool_mib=[34, 34, 34, 34, 36, 34]), 0),
        (calls([100] * 6, cache_mib=[576, 576, 576, 576, 576, 577]), 0),
        (calls([100] * 6, recordings=[3, 4, 4, 4, 4, 5]), 0),
        (calls([100] * 6), 1),
    ],
    ids=["allocated", "graph pool", "cache", "recordings", "recoveries"],
)
def test_growth_of_anything_judged_is_not_flat(trace: list[dict[str, float]], recoveries: int) -> None:
    assert not mixed.judge(trace, recoveries)["flat"]


def test_a_recorded_workload_is_kept_by_name_and_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Result, table and picture side by side; what stands behind `--` is for the command."""
    started: list[list[str]] = []
    monkeypatch.setattr(record, "run", lambda words: started.append(words) or 0)

    assert 0 == record.main(["seed", "long", "--out", str(tmp_path / "new"), "--", "--rounds", "3"])
    assert ["seed", "long"] == [command[command.index("--workload") + 1] for command in started]
    assert ["--rounds", "3"] == started[0][6:8]
    assert re.fullmatch(
        rf"--json={re.escape(str(tmp_path))}/new/bench-seed-transformers-[0-9]+\.[0-9]+\.json", started[0][8]
    )
    assert (tmp_path / "new").is_dir()
