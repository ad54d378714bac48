"""What the kernels backend relies on in DeepSpeed: it is there, and where it is not, the layers serve."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from tests import engines
from tests.agreement import assert_same_tokens

OPS = "deepspeed.ops.transformer.inference"
LAYER = "deepspeed.model_implementations.transformers.ds_transformer"
# Module, owner, name: each of it is a private use in hepatch/kernel_probes.py.
RELIED_ON = [
    (LAYER, "DeepSpeedTransformerInference", "layer_id"),
    (LAYER, "DeepSpeedTransformerInference", "workspace"),
    (f"{OPS}.ds_attention", "DeepSpeedSelfAttention", "num_layers"),
    (f"{OPS}.ds_attention", "DeepSpeedSelfAttention", "_qkv_buffers"),
    (f"{OPS}.ds_attention", "DeepSpeedSelfAttention", "compute_attention"),
    (f"{OPS}.ds_mlp", "DeepSpeedMLP", "_inter_w_buffers"),
    (f"{OPS}.op_binding.workspace", "WorkspaceOp", "allocate_workspace"),
    (f"{OPS}.op_binding.workspace", "WorkspaceOp", "is_allocated"),
    (f"{OPS}.op_binding.workspace", "WorkspaceOp", "release_workspace"),
    (f"{OPS}.op_binding.workspace", "InferenceContext", "reset_tokens"),
    (f"{OPS}.op_binding.workspace", "InferenceContext", "get_max_tokens_num"),
    ("deepspeed.module_inject.containers.features.hybrid_engine", "HybridEngineContainer", "transform_for_inference"),
    ("deepspeed.module_inject.containers.features.hybrid_engine", "HybridEngineContainer", "reset_params"),
    ("deepspeed.module_inject.policy", None, "maybe_get_lora"),
    ("deepspeed.runtime.hybrid_engine", "DeepSpeedHybridEngine", "new_inference_container"),
]
PARAMETERS = {
    "compute_attention": ["qkv_out", "input_mask", "layer_past", "alibi", "is_prompt", "token_idx", "position_ids"],
    "reset_tokens": ["initial_tokens"],
    "maybe_get_lora": ["p"],
    "new_inference_container": ["orig_layer", "policy_cls", "layer_id"],
}
# Without these an engine with containers still works: they are for adapters, and for weights that moved.
NOT_MISSED_AT_ONCE = {"reset_params", "maybe_get_lora"}


def owner_of(module: str, owner: str | None) -> Any:
    loaded = importlib.import_module(module)
    return loaded if owner is None else getattr(loaded, owner)


@pytest.mark.parametrize(("module", "owner", "name"), RELIED_ON, ids=[name for _, _, name in RELIED_ON])
def test_it_is_there(module: str, owner: str | None, name: str) -> None:
    found = getattr(owner_of(module, owner), name, None)

    assert hasattr(owner_of(module, owner), name), f"{module}: {name} is gone; containers are not admitted without it"
    if name in PARAMETERS:
        given = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
        assert given == PARAMETERS[name], f"{name} takes other parameters than hepatch/kernel_probes.py passes"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [case for case in RELIED_ON if case[2] not in NOT_MISSED_AT_ONCE],
    ids=[name for _, _, name in RELIED_ON if name not in NOT_MISSED_AT_ONCE],
)
def test_where_it_is_gone_the_layers_serve(
    build: Any, monkeypatch: pytest.MonkeyPatch, module: str, owner: str | None, name: str
) -> None:
    """Tokens are right, nothing raises, and the reason names what was missing."""
    monkeypatch.delattr(owner_of(module, owner), name)

    actor = build("opt", expect="none")

    assert name in actor.report.refusals[0].reason
    prompt = engines.prompts(2, 6, (2,))
    assert_same_tokens(actor.expected(**prompt, max_new_tokens=6), actor.generated(**prompt, max_new_tokens=6))
