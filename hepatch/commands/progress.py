"""A progress bar over the steps of a command, and a line for each step that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], AbstractContextManager[None]]
"""Called with a title, gives a context manager around the work that has it."""


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Step]:
    """A bar over all steps, and a line for each that is done, which is all that a pipe or a log shows."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bar:
        task = bar.add_task("", total=steps)

        @contextmanager
        def step(title: str) -> Iterator[None]:
            bar.update(task, description=title)
            start = time.perf_counter()
            yield
            bar.advance(task)
            console.print(f"{time.perf_counter() - start:7.1f} s  {title}", style="dim", highlight=False)

        yield step
        bar.update(task, description="done")
