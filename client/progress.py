"""A job's events as a bar at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ..core.service.jobs import JobEvent

Progress: TypeAlias = bool | Callable[[JobEvent], None]
"""Whether to draw a bar on stderr where that is a terminal; or what to call for every event."""


@contextmanager
def watched(progress: Progress) -> Iterator[Callable[[JobEvent], None]]:
    """Something to call for every event of a job."""
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
                description=words(event),
            )

        yield show


def words(event: JobEvent) -> str:
    """An event in a few words, such as ``measuring layer blocks.3 (4 of 12)``."""
    data = event.data
    layer = f"layer {data['layer']}" if data.get("layer") else ""
    counts = f"({data.get('done', 0)} of {data['total']})" if data.get("total") else ""
    text = " ".join(filter(None, [str(data.get("step") or ""), layer, counts]))
    said = [text] if event.kind == "progress" and text else [event.kind]
    if data.get("message"):
        said.append(str(data["message"]))
    return "".join(letter for letter in ": ".join(said) if letter.isprintable())
