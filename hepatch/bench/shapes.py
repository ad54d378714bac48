"""The models that a benchmark can name: published sizes, random weights, nothing to download.

Sources: the `config.json` that each model was published with; only what decides the work of a step is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a model under the names of its transformers configuration class.

    Attributes:
        family: the `model_type` of the configuration.
        sizes: its arguments.
    """

    family: str
    sizes: dict[str, Any]


def _opt(hidden: int, layers: int, heads: int) -> Shape:
    return Shape(
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": hidden,
            "ffn_dim": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": hidden,
            "do_layer_norm_before": True,
            "dropout": 0.0,
        },
    )


def _rotary(
    family: str,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int],
    positions: int,
    **more: Any,
) -> Shape:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }
    return Shape(family, {**sizes, **more})


SHAPES: dict[str, Shape] = {
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "llama-1b": _rotary("llama", 128256, 2048, 8192, 16, (32, 8), 131072),
    "qwen2-0.5b": _rotary("qwen2", 151936, 896, 4864, 24, (14, 2), 131072),
    "smollm2": _rotary("llama", 49152, 576, 1536, 30, (9, 3), 8192),
    # Weights wide enough that greedy answers vary; with the usual 0.02 a random model of this size says one token.
    # A family without inference containers, so that stock DeepSpeed can initialise it on a CPU too.
    "tiny": _rotary("qwen2", 512, 64, 128, 2, (4, 2), 256, initializer_range=0.2, tie_word_embeddings=False),
}
"""Every shape by name: OPT-125M and 1.3B, Llama-3.2-1B, Qwen2-0.5B, SmolLM2-135M, and one to try a run with."""
