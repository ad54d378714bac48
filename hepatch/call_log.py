"""One line per generate at info level: what path it took, how long, and what was recorded for it.

A decorator of `hepatch.decode`'s loops, so that they need not know. Below info level it costs one comparison a call.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from hepatch.report import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from hepatch.attachments import Attachment


def logged(decoding: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a decoding loop log each of its calls.

    Args:
        decoding: takes the original loop, the attachment, positional and keyword arguments of the call, and more.
    """

    @functools.wraps(decoding)
    def timed(
        original: Callable[..., Any], attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any
    ) -> Any:
        if not logger.isEnabledFor(logging.INFO):
            return decoding(original, attachment, args, kwargs, *more)
        counters = attachment.counters
        recorded, compiled = counters.recordings, counters.compilations
        started = time.perf_counter()
        result = decoding(original, attachment, args, kwargs, *more)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        prompt = args[0] if args else kwargs.get("input_ids")
        rows = 0 if prompt is None else int(prompt.shape[0])
        counts = counters.recordings - recorded, counters.compilations - compiled
        logger.info("%s", line(attachment, rows, elapsed_ms, counts))
        return result

    return timed


def line(attachment: Attachment, rows: int, elapsed_ms: float, counts: tuple[int, int]) -> str:
    """The line of a call that has just ended.

    Args:
        attachment: of the engine.
        rows: of the prompt.
        elapsed_ms: the whole loop's, prompt included; the loop ends by reading from the device, so nothing is pending.
        counts: recordings and compilations that the call made.
    """
    last = attachment.last_call
    if last is None:
        return f"hepatch: generate {attachment.name}: {elapsed_ms:.1f} ms on a path of its own"
    why = f" ({last.reason})" if last.reason else ""
    steps = max(1, last.new_tokens)
    return (
        f"hepatch: generate {attachment.name}: {last.path}{why}, {rows} x ({last.prompt_tokens} + {last.new_tokens})"
        f" tokens, {elapsed_ms:.1f} ms, {elapsed_ms / steps:.2f} ms per step with the prompt's,"
        f" recordings {counts[0]}, compilations {counts[1]}"
    )
