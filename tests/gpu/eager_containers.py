"""The eager HybridEngine with DeepSpeed's containers, unpatched, in a process of its own: an oracle of tokens.

`python -m tests.gpu.eager_containers DTYPE FILE` writes the calls it made and what they gave, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

ROWS, SHORTEST, LONGEST, FEWEST, MOST = (8, 3, 1), 16, 256, 4, 128
CALLS = 60
VOCABULARY = 2048


def schedule() -> list[dict[str, Any]]:
    """Sixty calls of random sizes, and one of the largest batch first: stock sizes its workspace by it."""
    draw = random.Random(4)
    calls = [{"rows": 8, "columns": 64, "new": 64, "early": False}]
    while len(calls) < CALLS:
        calls.append(
            {
                "rows": draw.choice(ROWS),
                "columns": draw.randint(SHORTEST, LONGEST),
                "new": draw.randint(FEWEST, MOST),
                "early": len(calls) % 3 == 0,
            }
        )
    return calls


def build(dtype: str, device: str) -> Any:
    """The same engine in every process: OPT of four layers, wide enough for the kernels' tensor cores."""
    import torch

    from tests import engines

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = engines.opt(
            VOCABULARY,
            hidden_size=512,
            ffn_dim=2048,
            word_embed_proj_dim=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            max_position_embeddings=512,
            init_std=0.05,
            dropout=0.0,
        )
    engine = engines.build_engine(model.to(device), dtype=dtype, stage=2, lr=0.2, hybrid={"max_out_tokens": 400})
    engine.eval()
    return engine


def prompt(call: dict[str, Any], device: str) -> dict[str, Any]:
    """The prompt of a call; rows but the last are padded to various lengths."""
    from tests import engines

    rows, columns = call["rows"], call["columns"]
    pads = [(7 * row + columns) % (columns // 2) for row in range(rows - 1)]
    made = engines.prompts(rows, columns, pads, seed=columns + rows, vocabulary=VOCABULARY)
    return {name: tensor.to(device) for name, tensor in made.items()}


def answer(engine: Any, call: dict[str, Any], device: str) -> list[list[int]]:
    """What the engine generates for a call."""
    import torch

    from tests import engines

    with torch.no_grad():
        tokens = engine.generate(
            **prompt(call, device),
            max_new_tokens=call["new"],
            do_sample=False,
            pad_token_id=engines.PAD,
            eos_token_id=call.get("ends"),
        )
    return tokens.tolist()


def main(dtype: str, file: str) -> None:
    """Makes the calls, chooses end tokens out of their answers, and writes both."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from tests.kernels import fallbacks

        fallbacks.install()
    engine = build(dtype, device)
    assert len(engine._inference_containers) == 4
    calls = schedule()
    for call in calls:
        call["answer"] = answer(engine, call, device)
        if call["early"]:
            new = [row[call["columns"] :] for row in call["answer"]]
            call["ends"] = sorted({row[(3 + 11 * index) % call["new"]] for index, row in enumerate(new)})
            call["answer"] = answer(engine, call, device)
    Path(file).write_text(json.dumps(calls))


if __name__ == "__main__":
    os.environ["HEPATCH"] = "0"
    main(*sys.argv[1:])
