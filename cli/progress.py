"""A progress bar on stderr, for people only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[int, int, str], None]


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[ProgressCallback | None]:
    """A callback ``(done, total, what)`` that draws a bar, or `None` where no one would see it.

    Args:
        quiet: Draw nothing even on a terminal; commands pass their ``--json``.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show
