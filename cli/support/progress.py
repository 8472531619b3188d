"""Progress on stderr: drawn in a terminal, and elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.plan.plan import Objective
    from ...core.progress import Progress as ProgressCallback
    from ...planner.problem.problem import Progress as PlanningProgress

DISPLAY_DELAY_S = 0.7
"""Planning that finishes sooner shows nothing: a display that flashes up helps no one."""


LINE_EVERY_S = 1.5
"""Where nothing can be drawn, a line this often, so that nothing is silent for three seconds, also
where an import keeps other threads from running for one."""


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say what is going on while it lasts; the callback changes the text.

    What is done in less than `DISPLAY_DELAY_S` says nothing in a terminal, and what is done in
    half of `LINE_EVERY_S` says nothing elsewhere. Slow packages are imported inside.
    """
    if sys.stderr.isatty():
        with _spinner(text) as change:
            yield change
        return
    # torch.export is captured with stderr redirected; these lines are not for that buffer.
    said, stderr = [text], sys.stderr
    began, over = time.monotonic(), Event()

    def tell() -> None:
        wait_s = LINE_EVERY_S / 2  # sooner at first: the start of Python was silent, too
        while not over.wait(wait_s):
            wait_s = LINE_EVERY_S
            seconds = time.monotonic() - began
            stderr.write(f"{said[0]} ({seconds:.0f} s)\n")
            stderr.flush()

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda changed: said.__setitem__(0, changed)
    finally:
        over.set()
        teller.join()


@contextmanager
def _spinner(text: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    task = bar.add_task(text)
    timer = Timer(DISPLAY_DELAY_S, bar.start)
    timer.start()
    try:
        yield lambda changed: bar.update(task, description=changed)
    finally:
        # The timer may be starting the bar right now; stopping the bar first would leave it on.
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[ProgressCallback | None]:
    """Yield a callback ``(done, total, what)`` that draws a bar, or writes lines elsewhere."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        with working("measuring") as change:
            yield lambda done, total, what: change(f"measuring {what}, {done} of {total}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


@contextmanager
def planning_progress(
    objective: Objective, *, quiet: bool
) -> Iterator[Callable[[PlanningProgress], None] | None]:
    """Yield a callback for `plan` that shows the best plan so far, or `None` if quiet."""
    if quiet:
        yield None
        return
    with working("planning") as change:
        yield lambda found: change(best_so_far(objective, found))


def best_so_far(objective: Objective, found: PlanningProgress) -> str:
    """Describe the best plan found so far and the bound on any plan."""
    from ...core.plan.table import format_best_so_far

    return f"planning: {format_best_so_far(objective, found.value, found.lower_bound)}"
