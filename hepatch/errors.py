"""What hepatch raises, and only under `HEPATCH_STRICT=1`."""

from __future__ import annotations


class HepatchError(RuntimeError):
    """Base of the errors below."""


class RefusedError(HepatchError):
    """A guard refused a call that would have gone on eagerly without `HEPATCH_STRICT=1`."""


class FailedError(HepatchError):
    """A region failed in a call that would have been finished eagerly without `HEPATCH_STRICT=1`."""


def first_line(error: BaseException) -> str:
    """The first line of a message, which is what fits in a log line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
