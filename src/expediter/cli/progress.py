"""Progress on standard error while that is a terminal; scripts and pipes see none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Bar(Protocol):
    """Moves the bar."""

    def __call__(self, completed: int, note: str = "", total: int | None = None) -> None:
        """Say how many are done and, beside the bar, what was or is being done; `total` if it was not known before."""
        ...


@contextlib.contextmanager
def progress_bar(doing: str, unit: str, total: int | None = None) -> Iterator[Bar | None]:
    """Show a bar for as long as the block runs; None if nobody would see it.

    Args:
        doing: stands before the bar.
        unit: stands behind the numbers.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def update(completed: int, note: str = "", total: int | None = None) -> None:
            bar.update(task, completed=completed, description=note, total=total)

        yield update
