"""What is broken in the installed pair of DeepSpeed and transformers, and works with hepatch.

Each check is a plain function that raises where the fault shows. It runs here, with hepatch on, and once more in a
child with HEPATCH=0, where it must fail: so the repair is what makes it pass, and the switch gives stock back, faults
included.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import re

import pytest
import torch

from tests import engines, forked

NEW_TOKENS = 6


def _greedy(generate, prompt, **more):
    with torch.no_grad():
        return generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **more).tolist()


def _built(family="opt", **arguments):
    model = engines.build_model(family)
    oracle = engines.oracle(model)
    engine = engines.build_engine(model, **arguments)
    return engine, oracle


def _weights(model):
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(model.parameters())
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with GatheredParameters(partitioned) if partitioned else contextlib.nullcontext():
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def initialize(family):
    """The engine is built, and every weight is bit for bit what it was."""
    engine, oracle = _built(family)
    before, after = _weights(oracle), _weights(engine.module)
    assert list(before) == list(after)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert list(oracle.state_dict()) == list(engine.module.state_dict())


def generate(family):
    """engine.generate and engine.module.generate give what the model gives without an engine."""
    engine, oracle = _built(family)
    engine.eval()
    prompt = engines.prompts(2, 8, (3,))
    expected = _greedy(oracle.generate, prompt)
    assert _greedy(engine.generate, prompt) == expected
    assert _greedy(engine.module.generate, prompt) == expected


def fresh_inputs(family="llama"):
    """The first call of a fresh engine may name its prompt `inputs`."""
    engine, oracle = _built(family)
    engine.eval()
    prompt = engines.prompts(2, 8)
    expected = _greedy(oracle.generate, prompt)
    got = _greedy(engine.generate, {"inputs": prompt["input_ids"], "attention_mask": prompt["attention_mask"]})
    assert got == expected
    assert engine._total_batch_size == 2


def fresh_positional(family="llama"):
    """The first call may pass its prompt by position, and its embeddings or nothing at all by name."""
    engine, oracle = _built(family)
    engine.eval()
    ids = engines.prompts(2, 8)["input_ids"]
    expected = oracle.generate(ids, max_new_tokens=3, do_sample=False).tolist()
    assert engine.generate(ids, max_new_tokens=3, do_sample=False).tolist() == expected
    engine._total_batch_size = None
    embeds = engine.module.get_input_embeddings()(ids).detach()
    assert engine.generate(None, inputs_embeds=embeds, max_new_tokens=3, do_sample=False).shape == (2, 3)
    assert engine._total_batch_size == 2
    engine._total_batch_size = None
    assert engine.generate(max_new_tokens=3, do_sample=False).shape[0] == 1


def one_token_prompt(family="opt"):
    """A prompt of one token on a fresh engine is a prompt and no decode step."""
    engine, oracle = _built(family)
    engine.eval()
    prompt = engines.prompts(2, 1)
    assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)


def eval_twice(family="opt"):
    """Switching to eval twice before the first generate changes nothing."""
    engine, oracle = _built(family)
    engine.eval()
    engine.eval()
    prompt = engines.prompts(2, 8, (3,))
    assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)
    engine.eval()


def module_train(family="opt"):
    """After module.train() alone, gradients are those of the plain model."""
    engine, oracle = _built(family)
    engine.eval()
    prompt = engines.prompts(2, 8)
    _greedy(engine.generate, prompt)
    ids = prompt["input_ids"]
    for model in (engine.module.train(), oracle.train()):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in oracle.named_parameters()}
    assert any(bool(gradient.abs().max() > 0) for gradient in expected.values())
    for name, value in engine.module.named_parameters():
        assert torch.equal(value.grad, expected[name]), name


def logprobs_between(family="opt"):
    """A log-prob forward in eval mode between generates changes neither, and gives what the model gives."""
    engine, oracle = _built(family)
    engine.eval()
    prompt, other = engines.prompts(2, 8, (3,)), engines.prompts(3, 11, seed=1)
    first = _greedy(engine.generate, prompt)
    with torch.no_grad():
        assert torch.equal(engine.module(**other).logits, oracle(**other).logits)
    assert _greedy(engine.generate, prompt) == first == _greedy(oracle.generate, prompt)


def deep_copy(family="opt"):
    """A deep copy of the engine's module is an ordinary model with weights of its own."""
    engine, oracle = _built(family, lr=0.5)
    engine.eval()
    prompt = engines.prompts(2, 8, (3,))
    _greedy(engine.module.generate, prompt)
    frozen = copy.deepcopy(engine.module)
    shared = {value.data_ptr() for value in engine.module.parameters()}
    assert not shared & {value.data_ptr() for value in frozen.parameters()}
    assert vars(frozen).keys() == vars(oracle).keys()
    engines.train_step(engine, prompt["input_ids"])
    engine.eval()
    assert _greedy(frozen.generate, prompt) == _greedy(oracle.generate, prompt)
    assert _greedy(engine.module.generate, prompt) != _greedy(oracle.generate, prompt)


def two_engines(family="opt"):
    """Two engines of one process do not disturb each other."""
    pairs = [_built(family), _built("llama")]
    for length in (5, 9):
        prompt = engines.prompts(2, length, (2,))
        for engine, oracle in pairs:
            engine.eval()
            assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)


def capture_keys(family="qwen2"):
    """Both names of the graph key are accepted, with either value, and the user's dictionary stays as it is."""
    import deepspeed

    for section in ({"enable_graph_capture": True}, {"enable_graph_capture": False, "enable_cuda_graph": True}):
        engines.start_distributed()
        config = engines.ds_config(hybrid=section)
        before = copy.deepcopy(config)
        model = engines.build_model(family)
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        assert config["hybrid_engine"] == before["hybrid_engine"]
        assert engine._config._param_dict["hybrid_engine"] == before["hybrid_engine"]


def zero3(family="llama"):
    """ZeRO-3 initializes, generates what the model generates, and leaves the weights bit for bit as they were."""
    engine, oracle = _built(family, stage=3)
    engine.eval()
    prompt = engines.prompts(2, 8, (3,))
    expected = _greedy(oracle.generate, prompt)
    assert _greedy(engine.generate, prompt) == expected
    assert _greedy(engine.module.generate, prompt) == expected
    before, after = _weights(oracle), _weights(engine.module)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def release_cache(family="opt"):
    """`release_inference_cache` does not stop a model that has no such cache."""
    engine, oracle = _built(family, hybrid={"release_inference_cache": True})
    engine.eval()
    prompt = engines.prompts(2, 8, (3,))
    for _ in range(2):
        assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)


def no_op_is_built(family="qwen2"):
    """No inference op is compiled or loaded, so neither nvcc nor the architecture list matters."""
    from deepspeed.ops.op_builder import InferenceBuilder

    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    stock, loads = InferenceBuilder.load, []
    InferenceBuilder.load = lambda self, *args, **kwargs: loads.append(self) or stock(self, *args, **kwargs)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            engine, oracle = _built(family)
    finally:
        InferenceBuilder.load = stock
        del os.environ["TORCH_CUDA_ARCH_LIST"]
    assert loads == []
    assert "fallback" not in printed.getvalue()
    engine.eval()
    prompt = engines.prompts(2, 8)
    assert _greedy(engine.module.generate, prompt) == _greedy(oracle.generate, prompt)


class NoGenerate(torch.nn.Module):
    """A model that cannot generate."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def model_without_generate(_=None):
    """engine.generate of a model without one says so, and training goes on."""
    engine = engines.build_engine(NoGenerate())
    engine.eval()
    try:
        engine.generate(torch.ones(1, 2, dtype=torch.int64))
    except AttributeError as error:
        assert "NoGenerate has none" in str(error), error  # noqa: PT017 - the check runs without pytest too
    else:
        raise AssertionError("it should have raised")
    engine.train()
    loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    engine.step()


CHECKS = {
    **{f"initialize {family}": (initialize, family) for family in engines.FAMILIES},
    **{f"generate {family}": (generate, family) for family in engines.FAMILIES},
    "generate(inputs=) on a fresh engine": (fresh_inputs, "llama"),
    "generate by position, by embeddings, from nothing": (fresh_positional, "llama"),
    "one-token prompt": (one_token_prompt, "opt"),
    "eval twice": (eval_twice, "opt"),
    "module.train() alone": (module_train, "opt"),
    "log-probs between generates": (logprobs_between, "opt"),
    "deep copy": (deep_copy, "opt"),
    "two engines": (two_engines, "opt"),
    "graph capture keys": (capture_keys, "qwen2"),
    "ZeRO-3 llama": (zero3, "llama"),
    "ZeRO-3 qwen2": (zero3, "qwen2"),
    "release_inference_cache": (release_cache, "opt"),
    "no op is built": (no_op_is_built, "qwen2"),
    "model without generate": (model_without_generate, None),
}

# What stock does on DeepSpeed 0.19.8 with transformers 5.24 where there is no CUDA: error class and message.
NO_KERNELS = ("ValueError", "had not been implemented on CPU backend")
NO_HANDLE = ("AttributeError", "no attribute '_generate'")
NEOX = ("AttributeError", "'GPTNeoXAttention' object has no attribute 'hidden_size'")
BLOOM = ("RuntimeError|SystemExit", "exceeds version 4.43.4")
STOCK_FAULTS = {
    **{f"initialize {family}": NO_KERNELS for family in ("opt", "llama", "gpt2")},
    "initialize gpt_neox": NEOX,
    "initialize bloom": BLOOM,
    **{f"generate {family}": NO_KERNELS for family in ("opt", "llama", "gpt2")},
    **{f"generate {family}": NO_HANDLE for family in ("qwen2", "qwen3", "mistral", "gemma2")},
    "generate gpt_neox": NEOX,
    "generate bloom": BLOOM,
    "generate(inputs=) on a fresh engine": NO_KERNELS,
    "generate by position, by embeddings, from nothing": NO_KERNELS,
    "one-token prompt": NO_KERNELS,
    "eval twice": NO_KERNELS,
    "module.train() alone": NO_KERNELS,
    "log-probs between generates": NO_KERNELS,
    "deep copy": NO_KERNELS,
    "two engines": NO_KERNELS,
    "graph capture keys": ("ValidationError", "enable_graph_capture"),
    "ZeRO-3 llama": NO_KERNELS,
    "ZeRO-3 qwen2": NO_HANDLE,
    "release_inference_cache": NO_KERNELS,
    "no op is built": ("AssertionError", ""),
    "model without generate": ("AssertionError", "no attribute '_generate'"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_repaired(name):
    """With hepatch the check passes."""
    check, family = CHECKS[name]
    check(family)


def stock(name):
    """Run a check in a child, with hepatch imported and the environment's switch off."""
    import hepatch  # noqa: F401 - imported as a user would

    check, family = CHECKS[name]
    check(family)


@pytest.fixture(scope="module")
def stock_outcomes():
    """The outcome of every check on stock, from one forking process."""
    preload = ("torch", "deepspeed", "transformers.generation.utils", "tests.engines")
    with forked.Forks(preload, {"HEPATCH": "0"}) as forks:
        return {name: forks.run("tests.test_repairs:stock", name) for name in CHECKS}


@pytest.mark.parametrize("name", STOCK_FAULTS)
def test_stock_fails(stock_outcomes, name):
    """Without hepatch the same check fails, by the known fault: where it no longer does, a repair may be retired."""
    outcome = stock_outcomes[name]
    classes, message = STOCK_FAULTS[name]

    assert re.fullmatch(classes, outcome.get("error", "no error")), outcome
    assert message in outcome["message"], outcome


def test_stock_is_fine_where_no_repair_is_claimed(stock_outcomes):
    """Checks without a known fault pass on stock too: they guard what hepatch must not break."""
    fine = [name for name in CHECKS if name not in STOCK_FAULTS]

    assert [name for name in fine if "error" in stock_outcomes[name]] == []


class TestNothingOfOursStays:
    def test_state_dicts_and_checkpoints(self, tmp_path):
        """Keys are the model's own; what is saved loads back into a plain model and into the engine."""
        engine, oracle = _built("llama", stage=2)
        engine.eval()
        prompt = engines.prompts(2, 8)
        _greedy(engine.generate, prompt)
        assert list(engine.module.state_dict()) == list(oracle.state_dict())
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        engine.load_checkpoint(str(tmp_path / "checkpoint"))
        engine.module.save_pretrained(tmp_path / "pretrained")
        loaded = type(oracle).from_pretrained(tmp_path / "pretrained")
        stored = io.BytesIO()
        torch.save(engine.module.state_dict(), stored)

        assert _greedy(loaded.generate, prompt) == _greedy(oracle.generate, prompt)
        assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)
        assert b"hepatch" not in stored.getvalue()

    def test_pickle_of_a_copy(self):
        """What only DeepSpeed's two root hooks keep from a pickle is one without them."""
        engine, oracle = _built("llama")
        engine.eval()
        prompt = engines.prompts(2, 8)
        _greedy(engine.generate, prompt)
        plain = copy.deepcopy(engine.module)
        plain._forward_hooks.clear()
        plain._forward_pre_hooks.clear()
        data = pickle.dumps(plain)

        assert b"hepatch" not in data
        assert _greedy(pickle.loads(data).generate, prompt) == _greedy(oracle.generate, prompt)

    def test_instance_attributes_of_the_model(self):
        """Generating through regions leaves no attribute on any module."""
        engine, oracle = _built("qwen2")
        engine.eval()
        _greedy(engine.generate, engines.prompts(2, 8))
        extra = {
            name: vars(module).keys() - vars(counterpart).keys()
            for (name, module), counterpart in zip(engine.module.named_modules(), oracle.modules(), strict=True)
        }

        assert {name: keys for name, keys in extra.items() if keys} == {}

    def test_second_model_of_the_same_class_is_left_alone(self):
        """A reference model beside the actor generates by transformers' own loop, whatever happens to the actor."""
        import hepatch

        engine, oracle = _built("qwen2")
        engine.eval()
        prompt = engines.prompts(2, 8)
        _greedy(engine.generate, prompt)
        last = hepatch.report(engine).last_call
        _greedy(oracle.generate, prompt)

        assert hepatch.report(engine).last_call is last


class TestDecodeGraphs:
    def test_engine_built_before_gives_them_up_and_gets_them_back(self):
        """DeepSpeed's own decode graphs act while hepatch is off, and only then."""
        graph_module = pytest.importorskip("deepspeed.runtime.hybrid_engine_graph")
        import hepatch

        hepatch.disable()
        engine, oracle = _built("qwen2")
        forward = engine.module.forward
        graphs = graph_module.DecodeGraphCache(forward, max_positions=64)
        engine._orig_module_forward, engine._decode_graphs = forward, graphs
        engine.eval()
        assert engine.module.forward is graphs
        hepatch.enable()
        engine.eval()
        prompt = engines.prompts(2, 8)

        assert engine._decode_graphs is None
        assert engine.module.forward == forward
        assert _greedy(engine.generate, prompt) == _greedy(oracle.generate, prompt)
        hepatch.disable()
        engine.eval()
        assert engine._decode_graphs is graphs
        assert engine.module.forward is graphs


def losses(_):
    """Run in a child: a few iterations of rollout and training."""
    import hepatch  # noqa: F401 - imported as a user would

    engine, _ = _built("qwen2", stage=2, lr=0.01)
    seen = []
    torch.manual_seed(3)
    for step in range(3):
        engine.eval()
        torch.manual_seed(step)
        rollout = engine.module.generate(
            **engines.prompts(2, 6, (2,), seed=step), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        torch.manual_seed(step)
        seen.append(engines.train_step(engine, rollout).hex())
    return seen + [value.double().sum().item().hex() for value in engine.module.parameters()]


def test_training_is_bit_identical():
    """The same inputs and seeds give the same losses and weights with and without hepatch."""
    with forked.Forks(("torch",)) as forks:
        ours, stock = (forks.run("tests.test_repairs:losses", None, {"HEPATCH": switch}) for switch in ("1", "0"))

    assert ours["result"] == stock["result"]
