"""Comparison of an engine with its oracle, and the proof that a region did the work."""

from __future__ import annotations

from typing import Any

import torch

import hepatch
from hepatch import attachments
from tests import engines


class Actor:
    """A real hybrid engine in eval mode and an untouched copy of its model that stock transformers generates with.

    Attributes:
        engine: from `deepspeed.initialize`.
        oracle: the copy, made before the engine.
    """

    def __init__(self, model: Any, **engine_arguments: Any) -> None:
        self.oracle = engines.oracle(model)
        self.engine = engines.build_engine(model, **engine_arguments)
        self.engine.eval()
        assert attachments.of_model(self.oracle) is None, "the oracle must not be one of ours"
        assert attachments.of_model(self.model) is not None, "the engine must be one of ours"

    @property
    def model(self) -> Any:
        """The engine's model."""
        return self.engine.module

    @property
    def report(self) -> Any:
        """What hepatch says about the engine now."""
        return hepatch.report(self.engine)

    def expected(self, *args: Any, **kwargs: Any) -> Any:
        """What the oracle generates; greedy unless told otherwise."""
        with torch.no_grad():
            return self.oracle.generate(*args, **{**self._defaults(kwargs), **kwargs})

    def generated(self, *args: Any, **kwargs: Any) -> Any:
        """What the engine's model generates, by whatever path."""
        with torch.no_grad():
            return self.model.generate(*args, **{**self._defaults(kwargs), **kwargs})

    def agree(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Generate by both, assert equal tokens and that the region made all but the first, and return them."""
        expected = self.expected(*args, **kwargs)
        got = self.generated(*args, **kwargs)
        assert_same_tokens(expected, got)
        self.assert_fused(got)
        return got

    def assert_fused(self, sequences: torch.Tensor) -> None:
        """Assert that the latest call ran in the region from its second token on."""
        last = self.report.last_call
        assert last is not None
        assert (last.path, last.reason) == ("fused", None)
        assert last.prompt_tokens + last.new_tokens == sequences.shape[1]
        # The stop flags are read every few steps, so a batch that ends early has run a few too many.
        assert last.region_steps >= last.new_tokens - 1
        assert last.eager_steps <= 1

    def train(self, seed: int = 0) -> None:
        """Run one optimizer step and give the oracle the new weights."""
        ids = engines.prompts(2, 12, seed=seed, vocabulary=self.model.config.vocab_size)["input_ids"]
        engines.train_step(self.engine, ids)
        self.engine.eval()
        self.oracle.load_state_dict(self.model.state_dict())

    def let_go(self) -> None:
        """Detach the engine, so that it weighs on no later test."""
        attachment = attachments.of_model(self.model)
        if attachment is not None:
            attachment.suspend()
            attachments.forget(attachment)
        torch._dynamo.reset()

    @staticmethod
    def _defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
        return {} if "generation_config" in kwargs else {"do_sample": False, "pad_token_id": engines.PAD}


def assert_same_tokens(expected: torch.Tensor, got: torch.Tensor) -> None:
    """Assert equal shape, dtype and every token, and say where they part."""
    assert expected.dtype == got.dtype
    assert expected.shape == got.shape, f"expected {list(expected.shape)}, got {list(got.shape)}"
    different = (expected != got).nonzero().tolist()
    assert not different, f"tokens differ at (row, column) {different[:5]}: {expected.tolist()} != {got.tolist()}"


def outcome(call: Any) -> tuple[Any, ...]:
    """What a call ends in, in comparable form: its tokens, or its exception's type and text."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return "raises", type(error), str(error)
    return "returns", result.dtype, result.tolist()
