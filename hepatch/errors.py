"""What hepatch raises, and only under `HEPATCH_STRICT=1`."""

from __future__ import annotations


class HepatchError(RuntimeError):
    """Base of the errors below."""


class RefusedError(HepatchError):
    """A guard refused a call that would have gone on eagerly without `HEPATCH_STRICT=1`."""


class FailedError(HepatchError):
    """A region failed in a call that would have been finished eagerly without `HEPATCH_STRICT=1`."""


def first_line(error: BaseException) -> str:
    """What fits in a log line: the first line of a message, behind it that of the root error where it is another."""
    root = error
    # Dynamo keeps what a backend raised in `inner_exception` and cuts the chain.
    while (inner := root.__cause__ or getattr(root, "inner_exception", None)) is not None:
        root = inner
    lines = dict.fromkeys(str(each).strip().partition("\n")[0] for each in (error, root))
    return ": ".join(line for line in lines if line) or "no message"
