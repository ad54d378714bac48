"""Training is what it would be without hepatch: losses, gradients, weights, flags and random states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import engines
from tests.agreement import Actor, assert_same_tokens

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the program writes without hepatch and with it, each in a process of its own."""
    folder = tmp_path_factory.mktemp("runs")
    return {switch: _run(folder / f"{switch}.pt", switch) for switch in ("0", "1")}


def _run(result, switch):
    environment = {
        # Not this process's group, which is under way.
        **{name: value for name, value in os.environ.items() if name not in {"MASTER_PORT", "MASTER_ADDR"}},
        "HEPATCH": switch,
        "HEPATCH_COMPILE_BACKEND": "eager",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, str(ROOT / "tests" / "training_program.py"), str(result)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(result)


class TestRuns:
    @pytest.mark.parametrize("engine", ["0 fp32", "2 bf16"])
    def test_one_ran_in_regions_and_the_other_did_not(self, runs, engine):
        """The comparison compares what it claims to compare."""
        assert runs["1"][engine]["paths"] == ["fused"] * 3
        assert runs["0"][engine]["paths"] == []
        assert len(runs["0"][engine]["losses"]) == 3

    @pytest.mark.parametrize("engine", ["0 fp32", "2 bf16"])
    def test_losses_gradients_and_weights_are_bit_identical(self, runs, engine):
        """For the same inputs and generator, with dropout, over three optimizer steps."""
        without, with_hepatch = runs["0"][engine], runs["1"][engine]

        assert all(
            torch.equal(one, other) for one, other in zip(without["losses"], with_hepatch["losses"], strict=True)
        )
        for one, other in zip(without["gradients"], with_hepatch["gradients"], strict=True):
            assert list(one) == list(other)
            assert [name for name in one if not torch.equal(one[name], other[name])] == []
            assert any(gradient.any() for gradient in one.values())
        assert list(without["weights"]) == list(with_hepatch["weights"])
        assert all(torch.equal(without["weights"][name], with_hepatch["weights"][name]) for name in without["weights"])

    def test_tokens_are_those_of_stock(self, runs):
        """Stock DeepSpeed's rollouts and the region's are the same in float32, before and after each step."""
        without, with_hepatch = runs["0"]["0 fp32"]["tokens"], runs["1"]["0 fp32"]["tokens"]

        assert all(torch.equal(one, other) for one, other in zip(without, with_hepatch, strict=True))

    @pytest.mark.parametrize("engine", ["0 fp32", "2 bf16"])
    def test_random_states_are_the_same(self, runs, engine):
        """Compiling and greedy decoding draw nothing; training draws dropout, so the states move."""
        without, with_hepatch = runs["0"][engine]["states"], runs["1"][engine]["states"]

        assert all(torch.equal(one, other) for one, other in zip(without, with_hepatch, strict=True))
        assert not torch.equal(without[0], without[1])


class TestCheckpointing:
    def test_flags_are_left_as_found(self):
        """With checkpointing on and use_cache off in the configuration, generate is fused and changes neither."""
        model = engines.build_model("llama")
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
        actor = Actor(model)
        before = self.flags(actor.model)

        actor.agree(**engines.prompts(2, 6, (2, 0)), max_new_tokens=8)

        assert before == self.flags(actor.model)
        assert any(before.values())
        assert actor.model.config.use_cache is False

    def test_it_is_still_active_in_training(self):
        """Each layer runs a second time in the backward pass, after a generate as before one."""
        model = engines.build_model("llama")
        model.gradient_checkpointing_enable()
        actor = Actor(model)
        actor.agree(**engines.prompts(2, 6), max_new_tokens=4)
        runs = []
        # Before the layer's last part: recomputing stops once every saved tensor is there, inside it.
        handle = actor.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))

        actor.train()
        handle.remove()

        assert len(runs) == 2
        actor.agree(**engines.prompts(2, 6), max_new_tokens=4)

    @staticmethod
    def flags(model):
        return {
            name: m.gradient_checkpointing for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")
        }


def test_use_cache_is_obeyed():
    """With use_cache=False in the generation config each step is a forward over the whole sequence, and eager."""
    actor = Actor(engines.build_model("llama"))
    prompt = engines.prompts(2, 6, (2, 0))
    want = actor.agree(**prompt, max_new_tokens=6)
    widths = []
    handle = actor.model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    actor.model.generation_config.use_cache = False

    got = actor.generated(**prompt, max_new_tokens=6)
    handle.remove()
    last = actor.report.last_call

    assert_same_tokens(want, got)
    assert widths == [6, 7, 8, 9, 10, 11]
    assert last.path == "eager"
    assert "use_cache=False" in last.reason
    actor.model.generation_config.use_cache = True
    actor.agree(**prompt, max_new_tokens=6)


def test_generate_in_training_mode_is_eager():
    """Dropout is never baked into a region: training mode is named as the reason, and eval mode is fused again."""
    actor = Actor(engines.build_model("opt", dropout=0.3))
    prompt = engines.prompts(2, 6, (2, 0))
    want = actor.agree(**prompt, max_new_tokens=6)

    actor.engine.train()
    actor.oracle.train()
    torch.manual_seed(3)
    expected = actor.expected(**prompt, max_new_tokens=6)
    torch.manual_seed(3)
    got = actor.generated(**prompt, max_new_tokens=6)
    last = actor.report.last_call
    actor.engine.eval()
    actor.oracle.eval()

    assert_same_tokens(expected, got)
    assert not torch.equal(want, got), "dropout must have had an effect"
    assert last.path == "eager"
    assert "training mode" in last.reason
    assert_same_tokens(want, actor.agree(**prompt, max_new_tokens=6))


def test_gradients_after_module_train_without_engine_train():
    """Switching the module alone, not the engine, trains the model's own layers."""
    actor = Actor(engines.build_model("opt", dropout=0.0), lr=0.0)
    ids = engines.prompts(2, 12)["input_ids"]
    actor.agree(**engines.prompts(2, 6), max_new_tokens=6)
    actor.oracle.train()
    loss = actor.oracle(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()

    actor.model.train()
    ours = actor.engine(input_ids=ids, labels=ids, use_cache=False).loss
    actor.engine.backward(ours)

    assert torch.equal(loss, ours)
    for (name, theirs), (_, parameter) in zip(
        actor.oracle.named_parameters(), actor.model.named_parameters(), strict=True
    ):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, theirs.grad, msg=name)


def test_log_probabilities_between_generates_change_nothing():
    """A forward in eval mode between two generates equals the oracle's and leaves the second generate as the first."""
    actor = Actor(engines.build_model("llama"))
    prompt = engines.prompts(2, 6, (2, 0))
    want = actor.agree(**prompt, max_new_tokens=8)
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 8, dtype=torch.long)], dim=1)

    with torch.no_grad():
        logits = actor.engine(input_ids=want, attention_mask=mask).logits
        expected = actor.oracle(input_ids=want, attention_mask=mask).logits

    assert torch.equal(expected, logits)
    assert torch.equal(want, actor.agree(**prompt, max_new_tokens=8))
