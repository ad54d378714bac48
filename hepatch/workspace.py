"""The inference workspace that DeepSpeed's hybrid engine asks for, built only when something really uses it.

Stock builds it in the constructor of every hybrid engine, although only its own containers need one, and building it
compiles or loads the CUDA inference op: that needs nvcc, fails on an architecture list with a suffix such as `9.0a`,
and on a CPU prints a line. With `release_inference_cache` stock then retakes it before each generate and gives up when
it answers no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LazyWorkspace:
    """Stands for a `WorkspaceOp` of the hybrid engine.

    While nothing is built, taking the workspace back succeeds and releasing it does nothing, because there is nothing
    to release. Any other use builds the real one, which answers from then on.

    Source:
        deepspeed/runtime/hybrid_engine.py, `DeepSpeedHybridEngine.__init__`, `retake_inference_cache` and `generate`;
        deepspeed/ops/transformer/inference/op_binding/workspace.py, `WorkspaceOp`.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """Remember how to build the real workspace."""
        self._build = build
        self._real: Any = None

    def retake_workspace(self) -> Any:
        """Take back what a release gave up; true if it is there."""
        return True if self._real is None else self._real.retake_workspace()

    def release_workspace(self) -> Any:
        """Give the memory up until the next `retake_workspace`."""
        return None if self._real is None else self._real.release_workspace()

    def is_allocated(self) -> bool:
        """Whether the real workspace holds memory."""
        return self._real is not None and bool(self._real.is_allocated())

    def real(self) -> Any:
        """The real `WorkspaceOp`, built now if it was not: compiles or loads the inference op."""
        if self._real is None:
            self._real = self._build()
        return self._real

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for dunder names before it has its attributes.
        if name.startswith("__") or "_build" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.real(), name)
