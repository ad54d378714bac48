"""A short RLHF-shaped run that writes down losses, gradients, tokens and random states; run with and without hepatch.

Usage: python training_program.py RESULT.pt, with HEPATCH=0 or HEPATCH=1 in the environment, which is all that two runs
may differ in.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hepatch
from tests import engines

CYCLES = 3


def run(stage: int, dtype: str) -> dict[str, Any]:
    """Three cycles of eval, generate, train and step with dropout, which follows the generator's state."""
    from deepspeed.utils import safe_get_full_grad

    torch.manual_seed(11)
    # Qwen2 is the one architecture that stock DeepSpeed neither injects nor breaks on a CPU.
    model = engines.build_model("qwen2", attention_dropout=0.2)
    engine = engines.build_engine(model, stage=stage, dtype=dtype, lr=0.02)
    written: dict[str, Any] = {"losses": [], "gradients": [], "tokens": [], "states": [], "paths": []}
    for cycle in range(CYCLES):
        prompt = engines.prompts(2, 8 + cycle, (2, 0), seed=cycle)
        engine.eval()
        with torch.no_grad():
            answer = engine.module.generate(**prompt, max_new_tokens=12, do_sample=False)
        if hepatch.report(engine).last_call is not None:
            written["paths"].append(hepatch.report(engine).last_call.path)
        written["states"].append(torch.get_rng_state())
        engine.train()
        # The same input in both runs: in bfloat16 a region's answer may part from eager's at a near tie.
        ids = engines.prompts(2, 20, seed=cycle)["input_ids"]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        gradients = {name: safe_get_full_grad(value) for name, value in engine.module.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values())
        engine.step()
        written["losses"].append(loss.detach().clone())
        written["gradients"].append({name: gradient.clone() for name, gradient in gradients.items()})
        written["tokens"].append(answer)
        written["states"].append(torch.get_rng_state())
    written["weights"] = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return written


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({f"{stage} {dtype}": run(stage, dtype) for stage, dtype in ((0, "fp32"), (2, "bf16"))}, sys.argv[1])
