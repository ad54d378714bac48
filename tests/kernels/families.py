"""Tiny random models of the families for which DeepSpeed has containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import engines

_IDS = {"pad_token_id": engines.PAD, "bos_token_id": 2, "eos_token_id": None}


def opt() -> Any:
    """OPT, with the feed-forward width that DeepSpeed's policy takes for granted."""
    return engines.opt(ffn_dim=4 * engines.HIDDEN)


def llama() -> Any:
    """Llama with as many KV heads as heads."""
    return engines.llama(num_key_value_heads=engines.HEADS)


def llama_grouped() -> Any:
    """Llama with grouped queries, whose weights DeepSpeed's policy damages."""
    return engines.llama(num_key_value_heads=2)


def gptj() -> Any:
    """GPT-J: parallel residual, partial rotary, no biases in attention."""
    import transformers as t

    config = t.GPTJConfig(
        vocab_size=engines.VOCABULARY,
        n_positions=engines.POSITIONS,
        n_embd=engines.HIDDEN,
        n_layer=2,
        n_head=engines.HEADS,
        rotary_dim=8,
        initializer_range=engines.WEIGHT_STD,
        **_IDS,
    )
    return engines.finish(t.GPTJForCausalLM, config)


def gpt_neo() -> Any:
    """GPT-Neo: a layer of full and one of local attention."""
    import transformers as t

    config = t.GPTNeoConfig(
        vocab_size=engines.VOCABULARY,
        max_position_embeddings=engines.POSITIONS,
        hidden_size=engines.HIDDEN,
        num_layers=2,
        num_heads=engines.HEADS,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        initializer_range=engines.WEIGHT_STD,
        **_IDS,
    )
    return engines.finish(t.GPTNeoForCausalLM, config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "opt": opt,
    "llama": llama,
    "llama_grouped": llama_grouped,
    "gpt_neox": engines.gpt_neox,
    "gptj": gptj,
    "gpt_neo": gpt_neo,
    "bloom": engines.bloom,
    "gpt2": engines.gpt2,
}


def build(family: str, seed: int = 0) -> Any:
    """A fresh model in eval mode; the same arguments give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FAMILIES[family]()
