"""`hepatch doctor`: what it tells apart, what it says to do, and the exit status that a script reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hepatch import stock_probes
from hepatch.commands import app
from hepatch.doctor import backend, configuration, examination, selftest
from hepatch.doctor.findings import Diagnosis, Judgement
from tests import standin
from tests.forked import run_python

DoctorCall = Callable[..., Result]


@pytest.fixture
def doctor() -> DoctorCall:
    def call(*options: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *options])

    return call


@pytest.fixture
def ds_config(tmp_path: Path) -> Callable[..., str]:
    """Write a ds_config with a hybrid engine and return its path."""

    def write(stage: int = 2, **hybrid: Any) -> str:
        path = tmp_path / "ds_config.json"
        section = {"enabled": True, **hybrid}
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "hybrid_engine": section}))
        return str(path)

    return write


def judgement(found: Diagnosis, rule: str) -> Judgement:
    return next(guard for guard in found.guards if guard.rule == rule)


def capability(found: Diagnosis, name: str) -> Any:
    return next(one for one in found.capabilities if one.name == name)


def model_folder(tmp_path: Path, config: Any) -> str:
    """A folder with a `config.json` and no weights: the doctor reads none."""
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    return str(folder)


def test_a_supported_model_and_configuration_would_run_a_region(doctor: DoctorCall, ds_config: Any) -> None:
    done = doctor("--model", "opt-125m", "--config", ds_config())

    assert 0 == done.exit_code
    assert "verdict: a region would run (native) (exit 0)" in done.stdout


def test_every_guard_is_judged_in_reading_order() -> None:
    from hepatch.guards import GUARDS

    found = examination.examine(None, "tiny")

    assert [guard.rule for guard in GUARDS] == [guard.rule for guard in found.guards]
    assert {"pass", "open"} == {guard.outcome for guard in found.guards}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_no_refusal_and_says_what_follows() -> None:
    """On a CPU a region runs compiled: right tokens, little speed."""
    found = examination.examine(None, "tiny")

    assert capability(found, "CUDA").present is False
    assert "no graphs are recorded" in capability(found, "CUDA").meaning
    assert 0 == found.verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="a torch that is built for CUDA may find its compiler")
def test_no_nvcc_is_told_and_is_no_hindrance_to_native_regions() -> None:
    nvcc = capability(examination.examine(None, None), "nvcc")

    assert nvcc.present is False
    assert "CUDA_HOME" in nvcc.detail
    assert "hepatch's native regions do not" in nvcc.meaning


@pytest.fixture
def with_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder where torch looks for a toolkit, with a compiler that says its release and can do no more."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path / "toolkit"))


@pytest.mark.usefixtures("with_nvcc")
def test_an_op_that_cannot_be_built_is_told_from_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture list with a suffix, as current GPUs want it, is read by DeepSpeed as a number."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")

    found = examination.examine(None, None)

    assert capability(found, "nvcc").present is True
    assert "[arch-list] TORCH_CUDA_ARCH_LIST" in capability(found, "DeepSpeed inference op").detail
    assert "no-nvcc" not in capability(found, "DeepSpeed inference op").detail


@pytest.mark.usefixtures("with_nvcc")
def test_a_plain_architecture_list_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")

    assert set() == stock_probes.op_obstacles().keys() - {"no-cuda", "incompatible"}


@pytest.mark.parametrize(
    ("rule", "stage", "hybrid", "remedy"),
    [
        ("zero3", 3, {}, "Use ZeRO stage 2 or lower"),
        ("released-cache", 2, {"release_inference_cache": True}, "Drop release_inference_cache"),
        ("tensor-parallel", 2, {"inference_tp_size": 2}, "Set inference_tp_size to 1"),
        ("disabled", 2, {"enable_graph_capture": False}, "Drop enable_graph_capture"),
        ("hybrid-engine", 2, {"enabled": False}, '"enabled": true'),
    ],
)
def test_a_configuration_that_stays_eager_says_which_rule_and_what_to_do(
    doctor: DoctorCall, ds_config: Any, rule: str, stage: int, hybrid: dict[str, Any], remedy: str
) -> None:
    done = doctor("--model", "opt-125m", "--config", ds_config(stage, **hybrid))

    assert 1 == done.exit_code
    line = next(line for line in done.stdout.splitlines() if line.startswith(f"  fail {rule}"))
    assert remedy in line
    assert f"verdict: eager: refused by {rule} (exit 1)" in done.stdout


def test_every_refusal_is_listed(ds_config: Any) -> None:
    found = examination.examine(Path(ds_config(3, inference_tp_size=2)), "opt-125m")

    assert ["zero3", "tensor-parallel"] == [guard.rule for guard in found.guards if guard.outcome == "fail"]
    assert "none" == found.backend


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig

    found = examination.examine(None, model_folder(tmp_path, ViTConfig(num_hidden_layers=1)))

    assert "fail" == judgement(found, "model").outcome
    assert "ViTModel" in judgement(found, "model").reason


def test_a_model_without_a_static_cache_is_refused(tmp_path: Path) -> None:
    """A state-space model has no KV cache of full length."""
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8)
    found = examination.examine(None, model_folder(tmp_path, config))

    assert "fail" == judgement(found, "static-cache").outcome
    assert "MambaForCausalLM" in judgement(found, "static-cache").reason


def test_a_transformers_too_new_for_a_container_is_told_from_one_that_fits() -> None:
    """Decided by what a layer returns: a tensor, where DeepSpeed's container returns a tuple, or a tuple as well."""
    from transformers import BloomConfig

    assert any(
        "transformers is too new for the container" in line for line in examination.examine(None, "opt-125m").stock
    )
    with torch.device("meta"):
        from transformers import BloomForCausalLM

        bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).eval()
    (layer,) = stock_probes.policies(bloom).layers
    assert stock_probes.layer_returns_tuple(bloom, layer) is True


def test_what_stock_would_do_is_said_of_the_model_at_hand() -> None:
    """No container for Qwen2, containers that damage weights for a Llama with grouped queries."""
    assert any(
        "No inference container is built for Qwen2" in line for line in examination.examine(None, "qwen2-0.5b").stock
    )
    assert any("can damage the weights" in line for line in examination.examine(None, "llama-1b").stock)
    assert not any("can damage the weights" in line for line in examination.examine(None, "opt-125m").stock)


def test_disabled_in_the_environment_is_eager_and_not_broken(
    doctor: DoctorCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hepatch

    monkeypatch.setenv("HEPATCH", "0")
    hepatch.enable()  # reads the environment again

    done = doctor("--model", "tiny")

    assert 1 == done.exit_code
    assert "  fail disabled: hepatch is switched off. Unset HEPATCH" in done.stdout
    assert "HEPATCH=False" in done.stdout
    assert "not applied: HEPATCH=0 is set in the environment" in done.stdout


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' sampling loop, put back as it stands whatever a test lets a library do to it."""
    from transformers.generation.utils import GenerationMixin

    monkeypatch.setattr(GenerationMixin, "_sample", vars(GenerationMixin)["_sample"])
    return GenerationMixin


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (
            "def loop(self, ids, *args, **kwargs): return ids",
            2,
            "buried: another library has put its own in this place",
        ),
        (
            "def loop(*args, before=mixin._sample, **kwargs): return before(*args, **kwargs)",
            0,
            "applied under rival.loop",
        ),
    ],
    ids=["replaced", "wrapped"],
)
def test_a_patch_that_another_library_replaced_is_told_from_one_that_it_wrapped(
    doctor: DoctorCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: int, words: str
) -> None:
    lines = ["from transformers.generation.utils import GenerationMixin as mixin", body, "mixin._sample = loop"]
    (tmp_path / "rival.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rival", raising=False)

    done = doctor("--model", "tiny", "--import", "rival")

    assert status == done.exit_code
    line = next(line for line in done.stdout.splitlines() if "GenerationMixin._sample" in line)
    assert words in line


def test_deepspeed_missing_is_broken_and_says_so() -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'deepspeed':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from hepatch.commands import app\n"
        "app(['doctor', '--model', 'tiny'])\n"
    )

    done = run_python(code)

    assert 2 == done.returncode, done.stderr
    assert "no   deepspeed: not installed. Hepatch has nothing to work on: pip install deepspeed." in done.stdout
    assert "verdict: broken: deepspeed: not installed" in done.stdout


def test_a_failed_hook_is_broken_and_shows_its_traceback(tmp_path: Path) -> None:
    """A transformers that has renamed the loop: nothing is patched, and the reason can be pasted into an issue."""
    folder = standin.write(tmp_path, {"def _sample(": "def _loop("})

    done = run_python(
        f"from tests import standin; standin.use({str(folder)!r})\nfrom hepatch.commands import app\napp(['doctor'])\n"
    )

    assert 2 == done.returncode, done.stderr
    assert "traceback of the failed hook:" in done.stdout
    assert "MissingTargetError: transformers.generation.utils.GenerationMixin._sample is missing" in done.stdout
    assert "verdict: broken: hepatch could not patch the installed releases" in done.stdout


def test_json_is_the_same_as_data(doctor: DoctorCall, ds_config: Any) -> None:
    done = doctor("--json", "--model", "opt-125m", "--config", ds_config(3))

    data = json.loads(done.stdout)
    assert ("eager", 1, done.exit_code) == (data["verdict"], data["exit"], 1)
    assert {"versions", "capabilities", "patches", "guards", "stock", "backend", "settings"} <= data.keys()
    assert "ds_config.json" == data["given"]["ds_config"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "absent.json"], "--config absent.json cannot be read"),
        (["--model", "absent"], "no such folder or file, and no shape"),
        (["--import", "absent_module"], "--import absent_module fails: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_read_costs_one_line(doctor: DoctorCall, options: list[str], words: str) -> None:
    done = doctor(*options)

    assert 2 == done.exit_code
    assert words in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        ('{"hybrid_engine": true}', "hybrid_engine is no JSON object"),
        ('{"zero_optimization": {"stage": "two"}}', "zero_optimization.stage is 'two'"),
    ],
)
def test_a_bad_ds_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)

    with pytest.raises(configuration.BadInputError, match=words):
        configuration.read(path)


def test_a_key_that_deepspeed_does_not_know_is_broken(doctor: DoctorCall, ds_config: Any) -> None:
    """deepspeed.initialize would raise for it; the keys that hepatch adds are not among them."""
    assert 2 == doctor("--config", ds_config(max_out_token=5)).exit_code
    assert 0 == doctor("--config", ds_config(enable_graph_capture=True)).exit_code


def test_self_test_compares_with_an_untouched_copy_before_and_after_a_step(doctor: DoctorCall) -> None:
    done = doctor("--self-test")

    assert 0 == done.exit_code, done.output
    for name in (
        "tokens and log-probs",
        "the same in a second call",
        "the step moved the model",
        "tokens and log-probs of the new weights",
        "a region served the calls",
    ):
        assert f"  ok   {name}: " in done.stdout
    assert "active: yes, backend native" in done.stdout


def test_self_test_finds_weights_that_are_stale(doctor: DoctorCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers from before the step must not pass for answers of the new weights."""
    answers: list[Any] = []
    generate = selftest._generate

    def stale(*arguments: Any) -> Any:
        answers.append(generate(*arguments))
        return answers[0]

    monkeypatch.setattr(selftest, "_generate", stale)

    done = doctor("--self-test")

    assert 2 == done.exit_code
    assert "  FAIL tokens and log-probs of the new weights" in done.stdout
    assert "verdict: broken: self-test: tokens and log-probs of the new weights (exit 2)" in done.stdout


def test_self_test_under_zero3_is_right_and_eager(doctor: DoctorCall, ds_config: Any) -> None:
    """A refusal is no failure: the tokens are right, and the exit status is that of eager."""
    done = doctor("--self-test", "--config", ds_config(3))

    assert 1 == done.exit_code, done.output
    assert "  ok   tokens and log-probs of the new weights: " in done.stdout
    assert "a region served the calls" not in done.stdout


def test_self_test_is_left_out_while_hepatch_is_off(doctor: DoctorCall, monkeypatch: pytest.MonkeyPatch) -> None:
    import hepatch

    monkeypatch.setenv("HEPATCH", "0")
    hepatch.enable()  # reads the environment again

    done = doctor("--self-test")

    assert 1 == done.exit_code
    assert "The self-test is left out: hepatch is off" in done.stderr


@pytest.mark.parametrize(
    ("setting", "static_cache", "no_kernels", "expected"),
    [
        ("auto", None, "no op", ("native", None, None)),
        ("auto", None, None, ("native", None, None)),
        ("auto", "no layers", None, ("kernels", None, None)),
        ("auto", "no layers", "no op", ("none", "no layers, and no op", None)),
        ("kernels", None, None, ("kernels", None, None)),
        ("kernels", None, "no op", ("native", None, "no op")),
        ("native", "no layers", None, ("none", "no layers", None)),
    ],
)
def test_the_backend_is_guessed_as_an_engine_would_choose_it(
    setting: str, static_cache: str | None, no_kernels: str | None, expected: tuple[str, str | None, str | None]
) -> None:
    assert expected == backend.choose(setting, static_cache, no_kernels)


def test_kernels_that_were_asked_for_and_cannot_be_had_are_refused(
    doctor: DoctorCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why not stands in the refusal: no policy, no op, or a transformers too new for the container."""
    monkeypatch.setenv("HEPATCH_BACKEND", "kernels")

    done = doctor("--model", "qwen2-0.5b")

    assert 1 == done.exit_code
    assert (
        "  fail backend: HEPATCH_BACKEND=kernels, but DeepSpeed has no container for the layers of Qwen2" in done.stdout
    )


def test_an_engine_of_the_self_test_that_is_refused_makes_it_eager(
    doctor: DoctorCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model the guards cannot judge a static cache; the self-test's engine can."""
    from hepatch import probes

    monkeypatch.setattr(probes, "static_cache_obstacle", lambda model: "no static cache here")

    done = doctor("--self-test")

    assert 1 == done.exit_code, done.output
    assert "verdict: eager: refused by static-cache (the self-test's engine) (exit 1)" in done.stdout
