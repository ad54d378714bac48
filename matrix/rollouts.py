"""What one process of a cell does with one model: as plain transformers, as stock DeepSpeed, and with hepatch.

Each function runs in a child of its own and returns JSON data. Models are built from the same seed on every side, so
that no side has to be told of another's weights; only what the optimizer made is handed over, in a file. Everything is
compared by the caller, in `matrix.cell`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
from collections.abc import Callable
from typing import Any

import torch

from tests import engines

NEW_TOKENS = 8
LEARNING_RATE = 0.05
"""Large enough for one step to change the tokens: a rollout from stale weights has to show."""

PROMPT = {"batch": 2, "length": 7, "pads": (3,)}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (PROMPT, {}),
    "one-token prompt": ({"batch": 2, "length": 1}, {}),
    "larger batch": ({"batch": 3, "length": 11, "pads": (4, 1)}, {}),
    "end token and scores": (
        PROMPT,
        {"eos_token_id": list(range(5, 100)), "return_dict_in_generate": True, "output_scores": True},
    ),
    "beams": (PROMPT, {"num_beams": 2}),
}
"""Prompt and arguments of each generate, by what it tries."""

Case = dict[str, Any]


def plain(case: Case) -> dict[str, Any]:
    """The oracle: transformers alone, in a process that has neither DeepSpeed nor hepatch in it.

    Args:
        case: `family`, and `trained`, a file with the weights after the optimizer's step.
    """
    model = engines.build_model(case["family"])
    answer = {"weights": _digest(model), "before": _calls(model.generate), "cache": _own_cache(model)}
    if case["trained"]:
        model.load_state_dict(torch.load(case["trained"], weights_only=True))
        answer["after"] = _calls(model.generate)
    return answer


def stock(case: Case) -> dict[str, Any]:
    """DeepSpeed without hepatch: each step of a rollout loop, until one fails.

    Args:
        case: `family` and `stage`, the ZeRO stage.
    """
    model = engines.build_model(case["family"])
    engine: Any = None
    answer: dict[str, Any] = {}

    def initialize() -> str:
        nonlocal engine
        engine = engines.build_engine(model, stage=case["stage"], lr=LEARNING_RATE)
        engine.eval()
        return _digest(model)

    steps: dict[str, Callable[[], Any]] = {
        "initialize": initialize,
        "engine.generate": lambda: _greedy(engine.generate),
        "engine.module.generate": lambda: _greedy(engine.module.generate),
        "train": lambda: _train(engine),
    }
    for name, step in steps.items():
        answer[name] = _outcome(step)
        if name == "initialize" and "error" in answer[name]:
            break
    return answer


def patched(case: Case) -> dict[str, Any]:
    """DeepSpeed with hepatch: a rollout, one optimizer step, and a rollout from the new weights.

    Args:
        case: `family`, `stage`, and `trained`, the file for the weights after the step.
    """
    import hepatch

    model = engines.build_model(case["family"])
    engine = engines.build_engine(model, stage=case["stage"], lr=LEARNING_RATE)
    engine.eval()
    answer: dict[str, Any] = {"weights": _digest(model)}
    answer["engine.generate"] = _greedy(engine.generate)
    answer["before"] = _calls(engine.module.generate)
    answer["path"] = hepatch.report(engine).to_dict() | {"versions": None}
    answer["greedy path"] = _path_of_greedy(engine)
    answer["cache"] = _own_cache(model)
    answer["loss"] = _train(engine)
    engine.eval()
    torch.save(_weights(model), case["trained"])
    answer["after"] = _calls(engine.module.generate)
    answer["greedy path after"] = _path_of_greedy(engine)
    return answer


def _path_of_greedy(engine: Any) -> dict[str, Any]:
    import hepatch

    _greedy(engine.module.generate)
    last = hepatch.report(engine).last_call
    assert last is not None
    return {"path": last.path, "reason": last.reason}


def _outcome(step: Callable[[], Any]) -> dict[str, Any]:
    try:
        # eval() prints its latencies.
        with contextlib.redirect_stdout(io.StringIO()):
            return {"result": step()}
    except BaseException as error:  # noqa: BLE001 - a model policy may exit
        return {"error": type(error).__name__, "message": (str(error).strip().splitlines() or [""])[0]}


def _train(engine: Any) -> float:
    # OPT drops out; what was drawn before is each side's own affair.
    torch.manual_seed(3)
    return engines.train_step(engine, engines.prompts(2, 9, seed=1)["input_ids"])


def _greedy(generate: Callable[..., Any]) -> list[list[int]]:
    with torch.no_grad():
        tokens: list[list[int]] = generate(
            **engines.prompts(**PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False
        ).tolist()
    return tokens


def _calls(generate: Callable[..., Any]) -> dict[str, Any]:
    answers = {}
    for name, (prompt, more) in CALLS.items():
        with torch.no_grad():
            output = generate(**engines.prompts(**prompt), max_new_tokens=NEW_TOKENS, do_sample=False, **more)
        answers[name] = output.tolist() if isinstance(output, torch.Tensor) else _parts(output)
    return answers


def _parts(output: Any) -> dict[str, Any]:
    """A dict output as data: its fields, the tokens, and each step's best score, to five places."""
    return {
        "fields": sorted(name for name, value in output.items() if value is not None),
        "sequences": output.sequences.tolist(),
        "scores": [[round(value, 5) for value in step.max(-1).values.tolist()] for step in output.scores],
    }


def _own_cache(model: Any) -> int:
    """Tokens in a KV cache of the caller's own after a generate that was given it; -1 where there is no such class."""
    import transformers

    names = inspect.signature(type(model).forward).parameters
    keyword = next((name for name in ("cache", "past_key_values") if name in names), None)
    cache_class = getattr(transformers, "DynamicCache", None)
    if keyword is None or cache_class is None:
        return -1
    cache = cache_class()
    try:
        with torch.no_grad():
            model.generate(**engines.prompts(**PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False, **{keyword: cache})
    except ValueError:
        # Bloom of transformers 4.44 takes no such cache.
        return -1
    return int(cache.get_seq_length())


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every entry of the state dict, whole where ZeRO-3 has it in parts."""
    partitioned = [value for value in model.parameters() if hasattr(value, "ds_id")]
    if not partitioned:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(partitioned):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in _weights(model).items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else repr(value).encode())
    return digest.hexdigest()
