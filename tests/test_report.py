"""What hepatch says: once per rule, by rank 0, and in a record that can be pasted and parsed."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import types

import pytest

from hepatch.guards import Refusal
from hepatch.report import Counters, LastCall, OnceLog, RankFilter, Report, logger, refusal_line, versions

REFUSAL = Refusal("zero3", "weights move", "Use ZeRO stage 2 or lower")


def _report(**changes) -> Report:
    values = {
        "active": False,
        "backend": "none",
        "refusals": (REFUSAL,),
        "patches": types.MappingProxyType({"a.b.C.d": "applied", "a.b.C.e": "a.b has no C.e"}),
        "compilations": 1,
        "recordings": 2,
        "recording_limit": 64,
        "replays": 30,
        "recoveries": 1,
        "failures": ("step 3: RuntimeError: out of memory",),
        "cache_mib": 12.25,
        "graph_mib": 0.0,
        "last_call": LastCall("eager", "beam search", 12, 20, 0, 20),
    }
    return Report(**{**values, **changes})


class TestReport:
    def test_fields_are_pinned(self):
        """The names are public and stable."""
        expected = [
            "active",
            "backend",
            "refusals",
            "patches",
            "compilations",
            "recordings",
            "recording_limit",
            "replays",
            "recoveries",
            "failures",
            "cache_mib",
            "graph_mib",
            "last_call",
        ]

        assert expected == [field.name for field in dataclasses.fields(Report)]

    def test_fields_of_last_call_are_pinned(self):
        """As are those of the latest call."""
        expected = ["path", "reason", "prompt_tokens", "new_tokens", "region_steps", "eager_steps"]

        assert expected == [field.name for field in dataclasses.fields(LastCall)]

    def test_is_frozen(self):
        """A report is what was, nobody edits it."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            _report().active = True

    def test_to_dict_survives_json(self):
        """Plain data: what json gives back is what went in."""
        data = _report().to_dict()

        assert data == json.loads(json.dumps(data))
        assert data["refusals"] == [{"rule": "zero3", "reason": "weights move", "remedy": "Use ZeRO stage 2 or lower"}]
        assert data["patches"] == {"a.b.C.d": "applied", "a.b.C.e": "a.b has no C.e"}
        assert data["failures"] == ["step 3: RuntimeError: out of memory"]
        assert data["last_call"]["new_tokens"] == 20

    def test_to_dict_has_every_field_and_the_versions(self):
        """Nothing of the record is left out."""
        fields = {field.name for field in dataclasses.fields(Report)}

        assert {*fields, "versions"} == set(_report().to_dict())
        assert _report(last_call=None).to_dict()["last_call"] is None

    def test_str_is_a_block_for_an_issue(self):
        """Versions on top, then every value, one fact a line."""
        lines = str(_report()).splitlines()

        assert re.match(r"hepatch \S+ · torch 2\S* · deepspeed 0\S+ · transformers \S+ · python 3\.", lines[0])
        assert lines[1:] == [
            "active: no, backend none",
            "refused [zero3]: weights move. Use ZeRO stage 2 or lower.",
            "compilations 1, replays 30, recoveries 1",
            "recordings 2 of at most 64",
            "memory: cache 12.2 MiB, graphs 0.0 MiB",
            "last call: eager (beam search), prompt 12, new 20, region steps 0, eager steps 20",
            "failure: step 3: RuntimeError: out of memory",
            "patch a.b.C.d: applied",
            "patch a.b.C.e: a.b has no C.e",
        ]

    def test_str_before_the_first_call(self):
        """A fresh engine's report says that nothing ran yet."""
        assert "last call: none yet" in str(_report(active=True, backend="native", refusals=(), last_call=None))


def test_counters_start_at_nothing():
    """Two engines do not share their failures."""
    one, other = Counters(), Counters()
    one.failures.append("x")

    assert Counters() == other


class TestOnceLog:
    def test_first_is_a_warning_and_later_ones_are_debug(self, caplog):
        """A key warns once, whatever the text; another key warns again."""
        once = OnceLog()
        with caplog.at_level(logging.DEBUG, logger="hepatch"):
            once.warn("zero3", "first")
            once.warn("zero3", "second")
            once.warn("hooks", "third")

        expected = [("first", logging.WARNING), ("second", logging.DEBUG), ("third", logging.WARNING)]
        assert expected == [(record.getMessage(), record.levelno) for record in caplog.records]

    def test_forget_warns_again(self, caplog):
        """After a reset the same fault is news."""
        once = OnceLog()
        once.warn("zero3", "first")
        once.forget()
        once.warn("zero3", "second")

        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            "first",
            "second",
        ]

    def test_text_is_not_a_format(self, caplog):
        """A percent sign in a reason is a percent sign."""
        OnceLog().warn("k", "100 % of %s")

        assert caplog.messages == ["100 % of %s"]

    def test_engines_do_not_share_it(self, caplog):
        """Each engine warns for itself."""
        OnceLog().warn("zero3", "one")
        OnceLog().warn("zero3", "other")

        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_refusal_line():
    """The log form: scope, rule, reason, remedy."""
    expected = "hepatch: eager for OPTForCausalLM [zero3]: weights move. Use ZeRO stage 2 or lower."

    assert expected == refusal_line("OPTForCausalLM", REFUSAL)


class TestLogger:
    def test_has_no_handlers_and_propagates(self):
        """What is written where is the application's choice."""
        assert logger.handlers == []
        assert logger.propagate

    def test_has_one_rank_filter(self):
        """Loading the module twice does not filter twice."""
        assert sum(isinstance(one, RankFilter) for one in logger.filters) == 1

    @pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False), (7, False)])
    def test_rank_0_speaks(self, monkeypatch, rank, speaks):
        """In a process group only the first rank writes."""
        import torch

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)

        assert speaks is RankFilter().filter(logging.makeLogRecord({}))

    def test_everyone_speaks_without_a_group(self, monkeypatch):
        """Before a process group exists nobody knows a rank."""
        import torch

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)

        assert RankFilter().filter(logging.makeLogRecord({}))

    def test_torch_is_not_loaded_to_ask(self, monkeypatch):
        """A process without torch logs, and still has no torch."""
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)

        assert RankFilter().filter(logging.makeLogRecord({}))
        assert "torch.distributed" not in sys.modules


class TestVersions:
    def test_names_what_an_issue_needs(self):
        """Package, hosts and Python, in this order."""
        assert list(versions()) == ["hepatch", "torch", "deepspeed", "transformers", "python"]

    def test_missing_package_is_said(self, monkeypatch):
        """A host that is not there is no exception."""
        monkeypatch.setattr(sys.modules["hepatch.report"], "_REPORTED_PACKAGES", ("no-such-package-here",))

        assert versions()["no-such-package-here"] == "not installed"

    def test_loaded_module_is_believed_first(self, monkeypatch):
        """A copy that stands earlier on the path is the one that runs."""
        monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="9.9"))

        assert versions()["transformers"] == "9.9"
