"""What the environment and a ds_config say, and what is done about values that make no sense."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hepatch import settings

VARIABLES = {
    "enabled": "HEPATCH",
    "backend": "HEPATCH_BACKEND",
    "strict": "HEPATCH_STRICT",
    "log": "HEPATCH_LOG",
    "bucket_tokens": "HEPATCH_BUCKET_TOKENS",
    "max_recordings": "HEPATCH_MAX_RECORDINGS",
    "max_positions": "HEPATCH_MAX_POSITIONS",
    "cache_mib": "HEPATCH_CACHE_MIB",
    "stop_check_steps": "HEPATCH_STOP_CHECK_STEPS",
    "compile_backend": "HEPATCH_COMPILE_BACKEND",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """No variable of ours, and nothing warned about yet."""
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    settings._warn_once.cache_clear()


def test_defaults():
    """An empty environment means: on, and every default."""
    expected = {
        "enabled": True,
        "backend": "auto",
        "strict": False,
        "log": "warning",
        "bucket_tokens": 128,
        "max_recordings": 64,
        "max_positions": 4096,
        "cache_mib": None,
        "stop_check_steps": 8,
        "compile_backend": "inductor",
    }

    assert expected == settings.read().model_dump()


def test_every_field_has_one_variable_and_a_meaning():
    """The names of the variables are public and stable."""
    fields = settings.Settings.model_fields

    assert {name: settings.variable_of(name) for name in fields} == VARIABLES
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("HEPATCH", "0", "enabled", False),
        ("HEPATCH", " Off ", "enabled", False),
        ("HEPATCH", "1", "enabled", True),
        ("HEPATCH", "", "enabled", True),
        ("HEPATCH_BACKEND", "native", "backend", "native"),
        ("HEPATCH_BACKEND", "Kernels ", "backend", "kernels"),
        ("HEPATCH_STRICT", "true", "strict", True),
        ("HEPATCH_LOG", "DEBUG", "log", "debug"),
        ("HEPATCH_BUCKET_TOKENS", "16", "bucket_tokens", 16),
        ("HEPATCH_MAX_RECORDINGS", "1", "max_recordings", 1),
        ("HEPATCH_CACHE_MIB", "512", "cache_mib", 512),
        ("HEPATCH_STOP_CHECK_STEPS", "1", "stop_check_steps", 1),
        ("HEPATCH_COMPILE_BACKEND", "aot_eager", "compile_backend", "aot_eager"),
    ],
)
def test_value_is_read(monkeypatch, variable, text, field, value):
    """Each variable reaches its field; case and blanks do not matter, an empty value is none."""
    monkeypatch.setenv(variable, text)

    assert value == getattr(settings.read(), field)


def test_read_follows_the_environment(monkeypatch):
    """Nothing is remembered between two reads."""
    monkeypatch.setenv("HEPATCH_BACKEND", "native")
    before = settings.read()
    monkeypatch.setenv("HEPATCH_BACKEND", "kernels")

    assert (before.backend, settings.read().backend) == ("native", "kernels")


def test_other_programs_variables_are_not_ours(monkeypatch):
    """A variable named like a field, without our prefix, means nothing to us."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "nonsense")
        monkeypatch.setenv(name.upper(), "nonsense")
        monkeypatch.setenv(f"HEPATCH_{name}", "nonsense")

    assert settings.Settings.model_construct() == settings.read()


@pytest.mark.parametrize(
    ("variable", "text", "accepted", "default"),
    [
        ("HEPATCH", "maybe", "0 or 1", "1"),
        ("HEPATCH_BACKEND", "cuda", "auto, kernels or native", "auto"),
        ("HEPATCH_STRICT", "2", "0 or 1", "0"),
        ("HEPATCH_LOG", "loud", "debug, info or warning", "warning"),
        ("HEPATCH_BUCKET_TOKENS", "15", "a whole number of at least 16", "128"),
        ("HEPATCH_MAX_RECORDINGS", "0", "a whole number of at least 1", "64"),
        ("HEPATCH_CACHE_MIB", "1.5", "a whole number of at least 1", "no limit"),
        ("HEPATCH_STOP_CHECK_STEPS", "eight", "a whole number of at least 1", "8"),
    ],
)
def test_bad_value_costs_one_line(monkeypatch, caplog, variable, text, accepted, default):
    """The line names the variable, what it held, what it may hold and the default; a second read adds none."""
    monkeypatch.setenv(variable, text)

    with caplog.at_level(logging.WARNING, logger="hepatch"):
        first = settings.read()
        second = settings.read()

    line = f"hepatch: {variable}='{text}' is not accepted; write {accepted} (default {default}). The default is used."
    assert [line] == caplog.messages
    assert settings.Settings.model_construct() == first == second


def test_bad_value_leaves_the_good_ones(monkeypatch, caplog):
    """One bad variable does not cost the others."""
    monkeypatch.setenv("HEPATCH_LOG", "loud")
    monkeypatch.setenv("HEPATCH_BUCKET_TOKENS", "few")
    monkeypatch.setenv("HEPATCH", "0")
    monkeypatch.setenv("HEPATCH_CACHE_MIB", "7")

    read = settings.read()

    assert (read.enabled, read.cache_mib, read.log, read.bucket_tokens) == (False, 7, "warning", 128)
    assert len(caplog.messages) == 2


def test_bad_value_raises_under_strict(monkeypatch, caplog):
    """Strict turns the line into an error."""
    line = r"^HEPATCH_BACKEND='cuda' is not accepted; write auto, kernels or native"

    with monkeypatch.context() as environment:
        environment.setenv("HEPATCH_STRICT", "1")
        environment.setenv("HEPATCH_BACKEND", "cuda")
        with pytest.raises(ValueError, match=line):
            settings.read()
    assert caplog.messages == []


@pytest.mark.parametrize("strict", ["0", "1"])
def test_bad_value_never_fails_an_import(strict):
    """Importing hepatch and a patched host works whatever the environment holds, strict or not."""
    program = "import hepatch, transformers.generation.utils; print('imported')"
    environment = {"HEPATCH_STRICT": strict, "HEPATCH_LOG": "loud", "HEPATCH_BUCKET_TOKENS": "none"}

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "imported\n"), ended.stderr


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class TestSettings:
    def test_is_frozen(self):
        """Nobody changes settings on the way."""
        with pytest.raises(ValueError, match="frozen"):
            settings.Settings().log = "debug"

    def test_misspelt_field_is_refused(self):
        """A keyword that is no field is an error, not silence."""
        with pytest.raises(ValueError, match="extra"):
            settings.Settings(bucket=3)


class TestGraphCaptureRequested:
    @pytest.mark.parametrize(
        ("section", "requested"),
        [
            ({}, None),
            ({"enabled": True}, None),
            ({"enable_graph_capture": True}, True),
            ({"enable_graph_capture": False}, False),
            ({"enable_cuda_graph": True}, True),
            ({"enable_cuda_graph": False}, False),
            ({"enable_graph_capture": False, "enable_cuda_graph": True}, False),
            ({"enable_graph_capture": None, "enable_cuda_graph": True}, True),
            ({"enable_cuda_graph": "False"}, False),
        ],
    )
    def test_says_what_the_user_wrote(self, section, requested):
        """The accelerator-neutral key counts first; an absent key is not a refusal."""
        assert settings.graph_capture_requested(section) is requested

    def test_nonsense_raises_one_line(self):
        """A value that is no boolean is named with its key."""
        with pytest.raises(
            ValueError, match=r"^ds_config hybrid_engine.enable_cuda_graph='fast' is not accepted; write"
        ):
            settings.graph_capture_requested({"enable_cuda_graph": "fast"})


class TestWithoutHepatchKeys:
    section = {"enabled": True, "enable_graph_capture": True, "enable_cuda_graph": False, "typo": 1}  # noqa: RUF012

    def test_unknown_ones_are_taken_out(self):
        """Neither key reaches a DeepSpeed that knows neither; a misspelt key stays for DeepSpeed to refuse."""
        assert settings.without_hepatch_keys(self.section, {"enabled"}) == {"enabled": True, "typo": 1}

    def test_known_one_stays(self):
        """A key that DeepSpeed knows is DeepSpeed's to read."""
        known = {"enabled", "enable_cuda_graph"}

        expected = {"enabled": True, "enable_cuda_graph": False, "typo": 1}
        assert expected == settings.without_hepatch_keys(self.section, known)

    def test_section_is_not_changed(self):
        """The user's dictionary is the user's."""
        before = dict(self.section)
        settings.without_hepatch_keys(self.section, ())

        assert before == self.section


def test_c_compiler_is_the_one_in_cc(monkeypatch):
    """CC names it; an empty CC names none."""
    monkeypatch.setenv("CC", "clang-17")
    named = settings.c_compiler()
    monkeypatch.setenv("CC", "")

    assert (named, settings.c_compiler()) == ("clang-17", None)
