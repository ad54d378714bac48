"""The version matrix: which pairs it has, what is recorded of them, and what the README says of that."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from matrix import cell, hosts, results, table, verdict
from matrix.pairs import IN_CI, NEWEST_TORCH, PAIRS, TORCH, Pair

ROOT = Path(__file__).resolve().parents[1]
DEEPSPEED = ("0.16.9", "0.17.6", "0.18.9", "0.19.8")
TRANSFORMERS = ("4.44.2", "4.48.3", "4.57.6", "5.0.0", "5.17.0", "5.24.0")
RECORDED = results.read()


class TestPairs:
    def test_every_release_stands_in_two_cells_and_the_corners_are_there(self):
        """One cell alone could not tell whose fault a failure is."""
        deepspeed = Counter(pair.deepspeed for pair in PAIRS)
        transformers = Counter(pair.transformers for pair in PAIRS)

        assert [version for version in DEEPSPEED if deepspeed[version] < 2] == []
        assert [version for version in TRANSFORMERS if transformers[version] < 2] == []
        for corner in product(DEEPSPEED[::3], TRANSFORMERS[::5]):
            assert Pair(*corner) in PAIRS

    def test_newest_torch_is_tried_once(self):
        assert [pair.torch for pair in PAIRS if pair.torch != TORCH] == [NEWEST_TORCH]

    def test_the_readmes_command_chooses_the_cells_that_it_names(self):
        pytest.importorskip("nox", reason="nox belongs to the extra dev")
        (chosen,) = re.findall(r'make matrix CELLS="([^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8"))
        command = [sys.executable, "-m", "nox", "--list", *chosen.split()]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
        version = chosen.split("-")[-1]

        assert re.findall(r"^\* matrix\(([^)]+)\)", listed, flags=re.MULTILINE) == [
            pair.name for pair in PAIRS if pair.transformers == version
        ]

    def test_ci_covers_both_ways_of_decoding(self):
        """An eager pair and a native one."""
        ways = {RECORDED[pair.name]["models"]["llama"]["hepatch"].partition(":")[0] for pair in IN_CI}

        assert ways == {"eager", "native"}


class TestResults:
    def test_every_pair_is_recorded_and_no_other(self):
        assert set(RECORDED) == {pair.name for pair in PAIRS}

    @pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
    def test_pair_is_green_and_complete(self, pair):
        """Every model was run, every suite passed, by the releases that the cell is named for."""
        record = RECORDED[pair.name]

        assert list(results.faults(record)) == []
        assert record["passed"]
        assert list(record["models"]) == [case.name for case in cell.CASES]
        assert record["versions"]["deepspeed"] == pair.deepspeed
        assert record["versions"]["transformers"] == pair.transformers
        assert record["versions"]["torch"].partition("+")[0] == pair.torch

    def test_no_path_of_a_machine(self):
        assert re.findall(r"/(?:home|tmp|root|work|usr)/\S*", results.FILE.read_text(encoding="utf-8")) == []

    def test_change_of_path_is_a_change(self):
        """A cell that slips from native to eager keeps its tokens, and is told all the same."""
        pair = IN_CI[-1]
        record = copy.deepcopy(RECORDED[pair.name])
        assert results.changed(pair, record) == []
        record["models"]["llama"]["hepatch"] = "eager: [static-cache] a reason"

        (line,) = results.changed(pair, record)
        assert line.startswith("llama, hepatch: was 'native'")

    def test_unknown_pair_is_a_change(self):
        assert results.changed(Pair("0.1", "0.2"), {"models": {}}) == [
            "deepspeed-0.1-transformers-0.2 has no recorded result: run `make matrix`"
        ]

    def test_releases_that_do_not_load(self):
        """That is the hosts' own fault; green if hepatch leaves it as it is, red if it changes the error."""
        record = {"pair": {}, "versions": {"error": "ImportError: gone"}, "models": {}, "suites": {}}

        assert list(results.faults({**record, "inert": True})) == []
        assert len(list(results.faults({**record, "inert": False}))) == 1


class TestVerdict:
    """A planted fault in what a side answers turns the case red; the answers are of the shape of real ones."""

    @pytest.fixture
    def truth(self):
        calls = {"greedy": [[1, 2]], "scores": {"sequences": [[1]], "scores": [[0.5]]}}
        after = {**calls, "greedy": [[1, 3]]}
        return {"weights": "a", "before": calls, "after": after, "cache": 14}

    @pytest.fixture
    def got(self, truth):
        fused = {"path": "fused", "reason": None}
        return {
            **copy.deepcopy(truth),
            "engine.generate": [[1, 2]],
            "path": {"failures": [], "recoveries": 0},
            "greedy path": fused,
            "greedy path after": fused,
            "loss": 1.5,
        }

    def judged(self, truth, got, stock=None):
        return verdict.compared({"result": truth}, {"result": stock or {}}, {"result": got})

    def test_green(self, truth, got):
        got["before"]["scores"]["scores"] = [[0.5005]]

        assert self.judged(truth, got) == {"stock": "works", "hepatch": "native", "wrong": []}

    @pytest.mark.parametrize(
        ("where", "value", "says"),
        [
            ("weights", "b", "changed the weights"),
            ("engine.generate", [[9, 9]], "engine.generate: other tokens"),
            ("cache", 0, "holds 0 tokens"),
            ("after", {"greedy": [[1, 2]], "scores": {}}, "greedy, after"),
            ("before", {"greedy": [[1, 2]], "scores": {"sequences": [[1]], "scores": [[0.6]]}}, "scores, before"),
            ("greedy path after", {"path": "eager", "reason": "failed"}, "path changed"),
            ("path", {"failures": ["a step failed"], "recoveries": 1}, "a region failed"),
        ],
    )
    def test_red(self, truth, got, where, value, says):
        got[where] = value

        assert any(says in line for line in self.judged(truth, got)["wrong"])

    def test_weights_that_did_not_move_show_nothing(self, truth, got):
        truth["after"]["greedy"] = got["after"]["greedy"] = [[1, 2]]

        assert self.judged(truth, got)["wrong"] == [
            "the optimizer's step did not change the tokens, so nothing was shown"
        ]

    def test_other_loss_than_stocks(self, truth, got):
        assert len(self.judged(truth, got, {"train": {"result": 1.25}})["wrong"]) == 1

    @pytest.mark.parametrize(
        ("stock", "outcome"),
        [
            ({"initialize": {"error": "ValueError", "message": "no op\nat all"}}, "initialize: ValueError: no op"),
            ({"initialize": {"result": "b"}}, "initialize: damages the weights"),
            ({"initialize": {"result": "a"}, "engine.generate": {"result": [[7]]}}, "engine.generate: wrong tokens"),
            ({"initialize": {"result": "a"}, "engine.generate": {"result": [[1, 2]]}}, "works"),
        ],
    )
    def test_what_stock_does(self, truth, got, stock, outcome):
        assert self.judged(truth, got, stock)["stock"] == outcome

    def test_side_that_dies(self, truth):
        died = {"error": "Died", "message": "wait status 9"}

        assert verdict.compared(died, {"result": {}}, {"result": {}})["wrong"] == [
            "the oracle failed: Died: wait status 9"
        ]
        assert verdict.compared({"result": truth}, died, died)["wrong"] == ["fails with hepatch: Died: wait status 9"]


class TestTable:
    def test_readme_has_the_table_of_the_results(self):
        """`python -m matrix.table` writes it."""
        readme = table.README.read_text(encoding="utf-8")

        assert table.written(readme, RECORDED) == readme

    def test_readme_without_a_place(self):
        with pytest.raises(ValueError, match="compatibility"):
            table.written("# hepatch", RECORDED)

    def test_pair_that_does_not_load_says_so(self):
        """The error stands in the row, and hepatch is inert there."""
        pair = Pair("0.1", "0.2")
        record = {
            "pair": vars(pair),
            "versions": {"error": "ImportError: gone"},
            "models": {},
            "suites": {},
            "passed": True,
            "seconds": 1,
        }

        assert "| 0.1 | 0.2 | does not load: ImportError: gone | inert | none |" in table.render({pair.name: record})


class TestHosts:
    def test_release_of_the_running_environment_is_used_from_there(self, monkeypatch, tmp_path):
        """Nothing is fetched and no folder made."""
        import deepspeed
        import transformers

        monkeypatch.setenv("MATRIX_HOSTS", str(tmp_path))
        pair = Pair(deepspeed.__version__, transformers.__version__, hosts._installed("torch"))
        environment = hosts.environment(pair)

        assert hosts.are_installed(pair)
        assert not hosts.are_installed(PAIRS[0])
        assert environment["PYTHONPATH"] == str(hosts.ROOT)
        assert list(tmp_path.iterdir()) == []

    def test_release_that_does_not_exist_is_named(self, monkeypatch, tmp_path):
        """One line, and no half-filled folder under the release's own name."""
        monkeypatch.setenv("MATRIX_HOSTS", str(tmp_path))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

        with pytest.raises(hosts.InstallError, match=r"^deepspeed 0\.0\.1 does not install: \S"):
            hosts.environment(Pair("0.0.1", "0.0.1"))
        assert not (tmp_path / "deepspeed-0.0.1").exists()

    def test_newest_that_is_a_cell_already_is_not_run_again(self, monkeypatch, capsys):
        monkeypatch.setattr(hosts, "_newest", {"deepspeed": "0.19.8", "transformers": "5.24.0"}.get)

        assert cell.main(["newest", "newest"]) == 0
        assert "is deepspeed-0.19.8-transformers-5.24.0 today" in capsys.readouterr().out

    def test_release_that_does_not_install_is_one_red_line(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("MATRIX_HOSTS", str(tmp_path))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

        assert cell.main(["0.0.1", "0.0.1"]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("RED deepspeed-0.0.1-transformers-0.0.1: deepspeed 0.0.1 does not install")

    def test_pair_that_does_not_load_fails_with_hepatch_as_without(self, tmp_path):
        """The host's own error and not a word more: hepatch's hook never comes to be called."""
        package = tmp_path / "deepspeed"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('built for another torch')\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(hosts.ROOT), str(tmp_path)])}

        assert cell._versions(environment) == {"error": "ImportError: built for another torch"}
        assert cell._versions(environment, first="import hepatch; ") == cell._versions(environment)

    def test_each_pair_has_its_own_extensions(self, monkeypatch, tmp_path):
        """DeepSpeed's compiled ops are named by operator alone."""
        monkeypatch.setenv("MATRIX_HOSTS", str(tmp_path))
        monkeypatch.setattr(hosts, "_place", lambda *_: None)
        folders = {hosts.environment(pair)["TORCH_EXTENSIONS_DIR"] for pair in PAIRS}

        assert len(folders) == len(PAIRS)
