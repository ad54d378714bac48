"""What the seed benchmark runs: one OPT actor, one batch of prompts, one DeepSpeed configuration for every system.

The weights depend on the seed, the device type and the dtype alone, so processes that share those hold the same model;
`fingerprint` shows it. The 1.3b numbers are those of OPT-1.3b's published configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 20


@dataclass(frozen=True)
class Workload:
    """Sizes of one benchmark: the model, the timed batch and the mixed calls that follow."""

    name: str
    hidden_size: int
    ffn_dim: int
    layers: int
    heads: int
    vocab_size: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    mixed_prompt_tokens: tuple[int, int]  # shortest and longest prompt of the mixed calls
    mixed_new_tokens: tuple[int, int]
    mixed_batches: tuple[int, ...] = (8, 3, 1)
    max_positions: int = 2048

    @property
    def kv_mib(self) -> float:
        """MiB of keys and values that `batch` full sequences need, at 2 bytes a number."""
        numbers = 2 * self.layers * self.batch * (self.prompt_tokens + self.new_tokens) * self.hidden_size
        return numbers * 2 / 2**20


FULL = Workload("opt-1.3b", 2048, 8192, 24, 32, 50272, 8, 256, 128, (16, 256), (4, 128))
TINY = Workload("opt-tiny", 64, 256, 2, 4, 512, 4, 24, 12, (4, 24), (2, 12), (4, 3, 1))


def build_model(workload: Workload, device: str, dtype: torch.dtype) -> Any:
    """The actor with random weights of `SEED`, in eval mode on `device`."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        ffn_dim=workload.ffn_dim,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        max_position_embeddings=workload.max_positions,
        word_embed_proj_dim=workload.hidden_size,
        do_layer_norm_before=True,
        dropout=0.0,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(SEED)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = OPTForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def build_prompts(workload: Workload, device: str, rows: int | None = None, length: int | None = None) -> torch.Tensor:
    """Random token ids, int64 `[rows, length]`, drawn on the CPU so that processes have the same; none is special."""
    import torch

    generator = torch.Generator().manual_seed(SEED + 1)
    shape = (max(workload.batch, *workload.mixed_batches), max(workload.prompt_tokens, workload.mixed_prompt_tokens[1]))
    ids = torch.randint(10, workload.vocab_size, shape, generator=generator)
    return ids[: rows or workload.batch, : length or workload.prompt_tokens].contiguous().to(device)


def fingerprint(model: Any) -> float:
    """Sum of the absolute weights in float64: equal in two processes that hold the same model."""
    import torch

    with torch.no_grad():
        return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in model.parameters()))


def engine_config(workload: Workload, device: str, *, hybrid: bool) -> dict[str, Any]:
    """The DeepSpeed configuration: ZeRO-2, fp16 (fp32 on a CPU), torch's own AdamW so that no optimizer op is built."""
    config: dict[str, Any] = {
        "train_batch_size": workload.batch,
        "train_micro_batch_size_per_gpu": workload.batch,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if device != "cpu":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if hybrid:
        config["hybrid_engine"] = {"enabled": True, "max_out_tokens": workload.prompt_tokens + workload.new_tokens}
    return config


def generate_arguments(new_tokens: int) -> dict[str, Any]:
    """Greedy, exactly `new_tokens` a row: `min_new_tokens` equals `max_new_tokens`, so the end token stays masked."""
    return {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 1}
