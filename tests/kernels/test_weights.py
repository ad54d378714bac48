"""Containers read the model's weights, whatever has happened to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hepatch
from tests import engines
from tests.agreement import assert_same_tokens
from tests.kernels import families


def perturb(state: dict[str, torch.Tensor], seed: int = 7) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_loaded_in_place(build: Any, family: str) -> None:
    actor = build(family)
    prompt = engines.prompts(2, 7, (2,))
    before = actor.agree(**prompt, max_new_tokens=10)
    state = perturb(actor.oracle.state_dict())

    actor.model.load_state_dict(state)
    actor.oracle.load_state_dict(state)

    assert not torch.equal(before, actor.agree(**prompt, max_new_tokens=10))


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_moved_to_other_memory(build: Any, family: str) -> None:
    """As `load_checkpoint` and `reload_states` do: each weight's data is another tensor, the fused ones stale."""
    actor = build(family)
    prompt = engines.prompts(2, 7, (2,))
    actor.agree(**prompt, max_new_tokens=10)
    state = perturb(actor.oracle.state_dict())

    for name, parameter in actor.model.named_parameters():
        parameter.data = state[name].clone()
    actor.oracle.load_state_dict(state)

    actor.agree(**prompt, max_new_tokens=10)
    assert actor.report.recoveries == 0


def test_checkpoint(build: Any, tmp_path: Any) -> None:
    actor = build(lr=0.05, stage=2)
    prompt = engines.prompts(2, 7, (2,))
    first = actor.agree(**prompt, max_new_tokens=10)
    actor.engine.save_checkpoint(str(tmp_path), tag="first")
    state = {name: value.clone() for name, value in actor.model.state_dict().items()}
    actor.train()
    assert not torch.equal(first, actor.agree(**prompt, max_new_tokens=10))

    actor.engine.load_checkpoint(str(tmp_path), tag="first")
    actor.engine.eval()
    actor.oracle.load_state_dict(state)

    assert_same_tokens(first, actor.agree(**prompt, max_new_tokens=10))


def test_replaced_by_another_parameter(build: Any) -> None:
    """The container keeps the old object, so the layers serve, and the report names the weight."""
    actor = build()
    prompt = engines.prompts(2, 7, (2,))
    actor.agree(**prompt, max_new_tokens=6)
    for model in (actor.model, actor.oracle):
        layer = model.model.decoder.layers[1]
        layer.fc1.weight = torch.nn.Parameter(layer.fc1.weight.detach().neg().clone())

    expected = actor.expected(**prompt, max_new_tokens=10)
    got = actor.generated(**prompt, max_new_tokens=10)

    assert_same_tokens(expected, got)
    assert "fc1.weight of layer 1" in actor.report.last_call.reason


@pytest.mark.parametrize("place", ["lm_head", "model.decoder.final_layer_norm", "model.decoder.embed_tokens"])
def test_replaced_outside_the_layers(build: Any, place: str) -> None:
    """What stands in for a norm, a projection or an embedding keeps the old object as well."""
    actor = build()
    prompt = engines.prompts(2, 7, (2,))
    actor.agree(**prompt, max_new_tokens=6)
    for model in (actor.model, actor.oracle):
        module = model.get_submodule(place)
        torch.manual_seed(3)
        module.weight = torch.nn.Parameter(torch.randn_like(module.weight))

    expected = actor.expected(**prompt, max_new_tokens=6)

    assert_same_tokens(expected, actor.generated(**prompt, max_new_tokens=6))
    assert "[weights]" in actor.report.last_call.reason


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_converted_and_back(build: Any, family: str) -> None:
    """Containers are of one dtype: in another the layers serve, and nothing becomes what the containers were."""
    actor = build(family)
    prompt = engines.prompts(2, 7, (2,))
    actor.agree(**prompt, max_new_tokens=6)
    for model in (actor.model, actor.oracle):
        model.to(torch.bfloat16)

    expected = actor.expected(**prompt, max_new_tokens=6)

    assert_same_tokens(expected, actor.generated(**prompt, max_new_tokens=6))
    assert "[weights]" in actor.report.last_call.reason
    assert {parameter.dtype for parameter in actor.model.parameters()} == {torch.bfloat16}
    for model in (actor.model, actor.oracle):
        model.to(torch.float32)
    actor.agree(**prompt, max_new_tokens=6)


class LoraLinear(torch.nn.Linear):
    """A linear layer with an adapter, in the form that DeepSpeed's containers fuse."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_right_weight = torch.nn.Parameter(0.3 * torch.randn(linear.in_features, 4))
        self.lora_left_weight = torch.nn.Parameter(0.3 * torch.randn(4, linear.out_features))
        self.lora_scaling = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = (x @ self.lora_right_weight) @ self.lora_left_weight
        return super().forward(x) + adapted * self.lora_scaling


def adapted(seed: int = 0) -> Any:
    """An OPT whose query and first feed-forward projections have adapters."""
    model = families.build("opt", seed)
    torch.manual_seed(seed)
    for layer in model.model.decoder.layers:
        layer.fc1 = LoraLinear(layer.fc1)
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
    return model


class TestLora:
    """DeepSpeed's own adapters are fused for the kernels and beside the weights for the layers."""

    @pytest.fixture
    def actor(self, build: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setitem(families.FAMILIES, "adapted", adapted)
        actor = build("adapted")
        assert len(actor.engine.all_lora_params) > 0
        return actor

    @pytest.mark.parametrize("by", ["engine", "model"])
    def test_tokens_follow_the_adapter(self, actor: Any, by: str) -> None:
        prompt = engines.prompts(2, 7, (2,))
        generate = actor.engine.generate if by == "engine" else actor.model.generate
        with torch.no_grad():
            for scale in (0.5, -0.8):
                for model in (actor.model, actor.oracle):
                    for module in model.modules():
                        if isinstance(module, LoraLinear):
                            module.lora_left_weight.mul_(scale)
                expected = actor.expected(**prompt, max_new_tokens=10)
                got = generate(**prompt, max_new_tokens=10, do_sample=False, pad_token_id=1)
                assert_same_tokens(expected, got)
                assert actor.report.last_call.path == "fused"

    @pytest.mark.parametrize("by", ["engine", "model"])
    def test_eager_calls_do_not_count_it_twice(self, actor: Any, by: str) -> None:
        prompt = engines.prompts(2, 7, (2,))
        generate = actor.engine.generate if by == "engine" else actor.model.generate

        expected = actor.expected(**prompt, max_new_tokens=8, num_beams=2)
        with torch.no_grad():
            got = generate(**prompt, max_new_tokens=8, num_beams=2, do_sample=False, pad_token_id=1)

        assert_same_tokens(expected, got)
        assert actor.report.last_call.path == "eager"

    def test_weights_are_as_before_afterwards(self, actor: Any) -> None:
        before = {name: value.clone() for name, value in actor.model.state_dict().items()}

        for _ in range(3):
            actor.engine.generate(**engines.prompts(2, 7), max_new_tokens=6, do_sample=False, pad_token_id=1)

        for name, value in actor.model.state_dict().items():
            torch.testing.assert_close(value, before[name])

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("nested", [False, True])
    def test_weights_are_as_before_after_an_error(self, actor: Any, error: type[BaseException], nested: bool) -> None:
        """What a streamer raises leaves the engine's generate, and the adapter must not stay in the weights."""
        before = {name: value.clone() for name, value in actor.model.state_dict().items()}
        asked = {**engines.prompts(1, 7), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}

        class Stops(engines.Streamed):
            def put(self, value: torch.Tensor) -> None:
                super().put(value)
                if len(self.shown) == 3 and nested and not inner.shown:
                    actor.engine.generate(**asked, streamer=inner)
                if len(self.shown) == 4:
                    raise error

        inner = Stops()
        with pytest.raises(error):
            actor.engine.generate(**asked, streamer=Stops())

        for name, value in actor.model.state_dict().items():
            torch.testing.assert_close(value, before[name])
        actor.agree(**engines.prompts(2, 7, (2,)), max_new_tokens=6)


def test_a_wrapped_projection_is_not_admitted(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's adapter lies beside the weight that a container reads: the container would leave it out."""

    class Wrapped(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base

        @property
        def weight(self) -> torch.Tensor:
            return self.base.weight

        @property
        def bias(self) -> torch.Tensor:
            return self.base.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 1.0

    def wrapped() -> Any:
        model = families.opt()
        model.model.decoder.layers[1].self_attn.q_proj = Wrapped(model.model.decoder.layers[1].self_attn.q_proj)
        return model

    monkeypatch.setitem(families.FAMILIES, "wrapped", wrapped)

    actor = build("wrapped", expect="none")

    assert "a Wrapped at self_attn.q_proj" in hepatch.report(actor.engine).refusals[0].reason
