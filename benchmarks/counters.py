"""What observation costs: counters at every replayed step, the log line of a call, ranges with and without a profiler.

Run `python -m benchmarks.counters`; no GPU is needed, because all of it is work of the host. The step itself is left
out: its compiled callable is replaced by one that does nothing, so that what remains is what hepatch adds around it.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

CALLS = 20_000


def microseconds(action: Callable[[], object], calls: int = CALLS, repeats: int = 7) -> float:
    """Median time of a call over repeats, in microseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            action()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(times)


def engine_after_a_call() -> Any:
    """A tiny engine that has compiled its region."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hepatch  # noqa: F401 - the import is what is measured
    from hepatch.commands.world import join_world_of_one

    join_world_of_one(cuda=torch.cuda.is_available())
    import deepspeed

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    config = {
        "train_batch_size": 2,
        "hybrid_engine": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.eval()
    ids = torch.randint(5, 256, (2, 8), device=engine.device)
    for _ in range(2):
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1)
    return engine


def main() -> None:
    """Measures and prints."""
    os.environ.setdefault("HEPATCH_COMPILE_BACKEND", "eager")
    import torch

    from hepatch import attachments, call_log, ranges
    from hepatch.report import logger

    attachment = attachments.attach(engine_after_a_call())
    assert attachment.regions is not None
    region = attachment.regions.any_region
    assert region is not None
    key = next(iter(region.visits))
    region._call = lambda _key, **_: None  # type: ignore[method-assign]
    bare, counted = microseconds(lambda: region._call(key, replay=True)), microseconds(lambda: region.run(key))
    print(f"{counted - bare:8.3f} us a step: counters and the look-up of the key")
    print(f"{microseconds(lambda: ranges.steps(region)):8.3f} us a call: asking whether a profiler looks")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        run = ranges.steps(region)
        seen = microseconds(lambda: run(key), calls=500, repeats=3)
    print(f"{seen - counted:8.3f} us a step: a named range, while torch.profiler records")

    ids = torch.ones(2, 8, dtype=torch.long)
    logged = call_log.logged(lambda *_: None)
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    for level in (logging.WARNING, logging.INFO):
        logger.setLevel(level)
        cost = microseconds(lambda: logged(None, attachment, (ids,), {}))
        print(f"{cost:8.3f} us a call: the log line, logger at {logging.getLevelName(level)}")


if __name__ == "__main__":
    main()
