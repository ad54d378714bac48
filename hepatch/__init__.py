"""hepatch: one import that makes the rollout half of a DeepSpeed HybridEngine loop run at the speed of the GPU.

Importing it registers a hook that patches DeepSpeed and transformers once they are loaded, or now if they are; it loads
neither of them, nor torch. `HEPATCH=0` in the environment, or `disable()`, gives stock back.
"""

from __future__ import annotations

from typing import Any

from hepatch import activation
from hepatch.activation import disable, enable

# Imported before the function of the same name is defined: the first import of a submodule sets the package's
# attribute, and a later one would put the module in the function's place.
from hepatch.report import Report

__all__ = ["__version__", "disable", "enable", "release", "report", "reset"]

__version__ = "0.1.0"


def report(engine: Any) -> Report:
    """What hepatch does for an engine now, and why not more.

    Args:
        engine: a `DeepSpeedHybridEngine`.

    Returns:
        A frozen record; `str()` of it can be pasted into an issue, its `to_dict()` is plain data.
    """
    from hepatch import attachments

    return attachments.attach(engine).report()


def release(engine: Any) -> None:
    """Free the caches and graphs of an engine now; its next generate records again.

    Args:
        engine: a `DeepSpeedHybridEngine`.
    """
    from hepatch import attachments

    attachments.attach(engine).release()


def reset(engine: Any) -> None:
    """Forget failures, counters and warnings of an engine and drop its regions, as if it had just been built.

    Args:
        engine: a `DeepSpeedHybridEngine`.
    """
    from hepatch import attachments

    attachments.attach(engine).reset()


activation.register()
