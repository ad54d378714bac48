"""One engine's life on a host that has drifted; runs in a child that has the real hosts loaded and hepatch not yet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tests import engines

NEW_TOKENS = 5


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def patching(drift: Callable[[], None]) -> dict[str, Any]:
    """Import hepatch on the drifted hosts: what is patched and what is said."""
    log = _listen()
    drift()
    import hepatch
    from hepatch import activation

    hepatch.enable()
    hepatch.enable()
    return {"on": activation.is_on(), "states": activation.patch_states(), "lines": log.lines}


def rollout(drift: Callable[[], None]) -> dict[str, Any]:
    """Import hepatch, build an engine, generate, train, generate: tokens against the oracle's, and the path."""
    log = _listen()
    model = engines.build_model("llama")
    oracle = engines.oracle(model)
    expected = _answers(oracle.generate)
    drift()
    import hepatch

    engine = engines.build_engine(model)
    engine.eval()
    before = _answers(engine.generate), _answers(engine.module.generate)
    path, reason = _last(engine)
    engines.train_step(engine, engines.prompts(2, 9, seed=1)["input_ids"])
    engine.eval()
    oracle.load_state_dict(model.state_dict())
    after = _answers(engine.module.generate)
    failures = []
    if path != "?":
        try:
            failures = list(hepatch.report(engine).failures)
        except Exception as error:  # noqa: BLE001 - a report on a host that it cannot read is no part of the rollout
            failures = [str(error)]
    return {
        "equal": [answer == expected for answer in before] + [after == _answers(oracle.generate)],
        "path": path,
        "said": [reason, *failures, *log.lines],
    }


def _last(engine: Any) -> tuple[str, str]:
    from hepatch import attachments

    attachment = attachments.of_engine(engine)
    if attachment is None:
        # Attaching failed, with a line in the log: the engine is as transformers left it.
        return "eager", ""
    last = attachment.last_call
    return ("?", "") if last is None else (last.path, last.reason or "")


def _answers(generate: Callable[..., Any]) -> list[Any]:
    """Tokens of a greedy call that returns a dict and of a plain one, which comes last for the report."""
    prompt = engines.prompts(2, 7, (3,))
    with torch.no_grad():
        # Without scores, which would be one more way of choosing tokens to compile for.
        whole = generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
        plain = generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [whole.sequences.tolist(), plain.tolist()]


def _listen() -> _Lines:
    lines = _Lines()
    logger = logging.getLogger("hepatch")
    logger.addHandler(lines)
    return lines
