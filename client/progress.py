"""Progress bar of a job at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ..core.service.jobs import JobEvent

Progress: TypeAlias = bool | Callable[[JobEvent], None]
"""Whether to draw a progress bar (on stderr, if that is a terminal), or a callback for events."""


@contextmanager
def show_progress(progress: Progress) -> Iterator[Callable[[JobEvent], None]]:
    """Provide the callback that receives every event of a job."""
    if callable(progress):
        yield progress
    elif progress and sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield lambda event: None


@contextmanager
def _bar() -> Iterator[Callable[[JobEvent], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("queued", total=None)

        def show(event: JobEvent) -> None:
            done, total = event.data.get("done"), event.data.get("total")
            counts = isinstance(done, int) and isinstance(total, int)
            bar.update(
                task,
                completed=done if counts else None,
                total=total if counts else None,
                description=describe_event(event),
            )

        yield show


def describe_event(event: JobEvent) -> str:
    """Describe an event in a few words, e.g. ``measuring layer blocks.3 (4 of 12)``."""
    data = event.data
    layer = f"layer {data['layer']}" if data.get("layer") else ""
    counts = f"({data.get('done', 0)} of {data['total']})" if data.get("total") else ""
    text = " ".join(filter(None, [str(data.get("step") or ""), layer, counts]))
    said = [text] if event.kind == "progress" and text else [event.kind]
    if data.get("message"):
        said.append(str(data["message"]))
    # The words come from the service: control characters could rewrite the user's terminal.
    return "".join(letter for letter in ": ".join(said) if letter.isprintable())
