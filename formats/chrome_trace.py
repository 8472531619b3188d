"""A timeline as Chrome trace events, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..core.plan.schedule import Work
from ..core.plan.timeline import HeldMemory, Timeline, TimelineEvent

RANKS, MESSAGES = 0, 1
"""Process ids: computation has one track a rank, communication may overlap and stands apart. A
second timeline has the next two."""


def chrome_trace(*timelines: Timeline) -> str:
    """JSON in the Trace Event Format, times in microseconds.

    Work is a complete event (``X``) on its rank's track. Messages and sums over replicas are
    asynchronous events (``b``, ``e``), since several can go on at once, and beside work. The
    activations each rank holds are a counter (``C``). Several timelines, such as the predicted
    and the measured one, stand one below the other on one axis.
    """
    events: list[dict[str, Any]] = []
    for place, timeline in enumerate(timelines):
        events += [_moved(event, place) for event in _events(timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _moved(event: dict[str, Any], place: int) -> dict[str, Any]:
    """Move an event to the process of one of several timelines; ids span the whole trace."""
    # Far apart, so that no two timelines share an id.
    ids = {"id": event["id"] + place * 10**9} if "id" in event else {}
    return {**event, "pid": event["pid"] + 2 * place, **ids}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _name("process_name", RANKS, 0, f"ranks ({timeline.source})")
    yield _name("process_name", MESSAGES, 0, f"messages ({timeline.source})")
    for rank in range(timeline.num_ranks):
        yield _name("thread_name", RANKS, rank, f"rank {rank}")
    for number, event in enumerate(timeline.events):
        yield from _trace_events(number, event)
    for held in timeline.memory:
        yield _counter(held)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _counter(held: HeldMemory) -> dict[str, Any]:
    return {
        "ph": "C", "name": f"activations of rank {held.rank}", "pid": RANKS,
        "ts": held.time_s * 1e6, "args": {"bytes": held.held_bytes},
    }  # fmt: skip


def _trace_events(number: int, event: TimelineEvent) -> list[dict[str, Any]]:
    is_message = event.kind in ("send_forward", "send_backward", "sync")
    shared = {
        "name": f"{event.stage}{event.kind.value}{event.microbatch}"
        if isinstance(event.kind, Work)
        else event.kind,
        "cat": event.kind.value if isinstance(event.kind, Work) else event.kind,
        "pid": MESSAGES if is_message else RANKS,
        "tid": event.rank,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }
    start_us, end_us = event.start_s * 1e6, event.end_s * 1e6
    if is_message:
        return [
            {**shared, "ph": "b", "id": number, "ts": start_us},
            {**shared, "ph": "e", "id": number, "ts": end_us},
        ]
    return [{**shared, "ph": "X", "ts": start_us, "dur": end_us - start_us}]
