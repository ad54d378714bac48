"""Tiny real models and real DeepSpeed engines for the tests: nothing here stands in for anything.

Models are random, two layers deep and wide in weight: with the usual initialisation a greedy run repeats one token, and
two implementations that disagree would still look equal. Sequences built here use token 1 as padding and never draw it.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

PAD = 1
"""Token id of the padding in every model and prompt built here."""

VOCABULARY = 512
POSITIONS = 256
HEADS = 4
HIDDEN = 64
LAYERS = 2
WEIGHT_STD = 0.2


def _ids(**more: Any) -> dict[str, Any]:
    # No end-of-sequence token by default: a test that wants one passes eos_token_id to generate.
    return {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": None, **more}


def _decoder(vocabulary: int, **more: Any) -> dict[str, Any]:
    return _ids(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=WEIGHT_STD,
        tie_word_embeddings=False,
        **more,
    )


def opt(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """An OPT model: learned positions, biases, ReLU."""
    import transformers as t

    return finish(
        t.OPTForCausalLM,
        t.OPTConfig(
            **{
                **_ids(
                    vocab_size=vocabulary,
                    hidden_size=HIDDEN,
                    ffn_dim=2 * HIDDEN,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS,
                    max_position_embeddings=POSITIONS,
                    word_embed_proj_dim=HIDDEN,
                    init_std=WEIGHT_STD,
                    tie_word_embeddings=False,
                ),
                **more,
            }
        ),
    )


def llama(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Llama model with grouped queries: four heads over two KV heads."""
    import transformers as t

    return finish(t.LlamaForCausalLM, t.LlamaConfig(**{**_decoder(vocabulary, num_key_value_heads=2), **more}))


def gpt_neox(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A GPT-NeoX model: parallel residual, partial rotary, one fused QKV matrix."""
    import transformers as t

    return finish(t.GPTNeoXForCausalLM, t.GPTNeoXConfig(**{**_decoder(vocabulary), **more}))


def qwen2(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Qwen2 model: grouped queries with QKV biases."""
    import transformers as t

    return finish(t.Qwen2ForCausalLM, t.Qwen2Config(**{**_decoder(vocabulary, num_key_value_heads=2), **more}))


def qwen3(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Qwen3 model: grouped queries, norms on Q and K, a head size of its own."""
    import transformers as t

    settings = {**_decoder(vocabulary, num_key_value_heads=2, head_dim=16), **more}
    return finish(t.Qwen3ForCausalLM, t.Qwen3Config(**settings))


def mistral(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Mistral model whose every layer attends to a window of eight positions."""
    import transformers as t

    settings = {**_decoder(vocabulary, num_key_value_heads=2, sliding_window=8), **more}
    return finish(t.MistralForCausalLM, t.MistralConfig(**settings))


def gemma2(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Gemma2 model: a sliding layer (eight positions) and a full one, eager attention, soft-capped logits."""
    import transformers as t

    own: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    settings = {**_decoder(vocabulary, **own), "attn_implementation": "eager", **more}
    return finish(t.Gemma2ForCausalLM, t.Gemma2Config(**settings))


def bloom(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A Bloom model: ALiBi, eager attention only."""
    import transformers as t

    settings = {
        **_ids(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            initializer_range=WEIGHT_STD,
            tie_word_embeddings=False,
        ),
        **more,
    }
    return finish(t.BloomForCausalLM, t.BloomConfig(**settings))


def gpt2(vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A GPT-2 model: Conv1D projections, learned positions, tied embeddings as published."""
    import transformers as t

    settings = {
        **_ids(
            vocab_size=vocabulary,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=POSITIONS,
            initializer_range=WEIGHT_STD,
        ),
        **more,
    }
    return finish(t.GPT2LMHeadModel, t.GPT2Config(**settings))


FAMILIES: Mapping[str, Callable[..., Any]] = {
    "opt": opt,
    "llama": llama,
    "gpt_neox": gpt_neox,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "bloom": bloom,
    "gpt2": gpt2,
}
"""Every architecture by name; each value takes the vocabulary size and configuration overrides."""


def build_model(family: str, vocabulary: int = VOCABULARY, seed: int = 0, **more: Any) -> Any:
    """Return a fresh random model in eval mode; the same arguments give the same weights.

    Args:
        family: a key of `FAMILIES`.
        vocabulary: number of tokens.
        seed: seed of the weights; the caller's RNG state is left as it was.
        more: overrides of the model's configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FAMILIES[family](vocabulary, **more)


def finish(cls: Any, config: Any) -> Any:
    """A model of a class and a configuration, in eval mode, with biases that are not zero."""
    model = cls(config).eval()
    with torch.no_grad():
        # Biases and norm scales start at constants that would hide a missing addition.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, WEIGHT_STD)
    return model


def oracle(model: Any) -> Any:
    """Return an untouched deep copy of a model that has no engine yet: what stock transformers answers."""
    return copy.deepcopy(model).eval()


def prompts(
    batch: int, length: int, pads: Sequence[int] = (), seed: int = 0, vocabulary: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    """Return left-padded prompts as generate takes them.

    Args:
        batch: number of rows.
        length: columns, padding included.
        pads: padding columns of the first rows, 0 for the rest.
        seed: seed of the tokens; the caller's RNG state is left as it was.
        vocabulary: tokens are drawn from 5 up to this.

    Returns:
        `input_ids` and `attention_mask`, both int64 `[batch, length]`.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, columns in enumerate(pads):
        ids[row, :columns] = PAD
        mask[row, :columns] = 0
    return {"input_ids": ids, "attention_mask": mask}


def start_distributed() -> None:
    """Give this process a gloo group of one, once, without DeepSpeed's compiled shared-memory op."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # init_distributed would compile a C++ extension (50 s) that a group of one has no use for.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed asks oneDNN and refuses fp16 on most CPUs; torch itself computes in it, slowly, which is enough.
        accelerator.is_fp16_supported = lambda: True
    if torch.distributed.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in own.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed(dist_backend="gloo" if not torch.cuda.is_available() else "nccl", verbose=False)


def ds_config(
    stage: int = 0,
    dtype: str = "fp32",
    lr: float = 1e-3,
    hybrid: Mapping[str, Any] | None = None,
    batch: int = 2,
    **more: Any,
) -> dict[str, Any]:
    """Return a DeepSpeed configuration with the hybrid engine on.

    Args:
        stage: ZeRO stage.
        dtype: fp32, fp16 or bf16.
        lr: learning rate of AdamW (torch's own, so that no op is compiled).
        hybrid: more keys of the `hybrid_engine` section; `None` as the value removes a key.
        batch: micro batch of one rank.
        more: more sections.
    """
    section = {"enabled": True, "max_out_tokens": POSITIONS, **(hybrid or {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {key: value for key, value in section.items() if value is not None},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        **more,
    }
    if dtype == "fp16":
        # A fixed scale, or the first steps of a test are skipped while the scale is searched.
        config["fp16"] = {"enabled": True, "loss_scale": 8.0}
    elif dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype != "fp32":
        raise ValueError(f"dtype {dtype!r} is none of fp32, fp16, bf16")
    return config


def build_engine(
    model: Any,
    stage: int = 0,
    dtype: str = "fp32",
    lr: float = 1e-3,
    hybrid: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Return what `deepspeed.initialize` makes of `model`: a real hybrid engine on this machine.

    Args: see `ds_config`; `more` goes there too.
    """
    import deepspeed

    start_distributed()
    config = ds_config(stage=stage, dtype=dtype, lr=lr, hybrid=hybrid, **more)
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train_step(engine: Any, ids: torch.Tensor) -> float:
    """Run one language-model step (forward, backward, step) on int64 `[batch, seq]` ids and return the loss."""
    engine.train()
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


class Streamed:
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.shown.append(value.tolist())

    def end(self) -> None:
        self.ended += 1
