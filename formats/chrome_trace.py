"""A timeline as Chrome trace events, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from ..core.schedule import Work
from ..core.timeline import HeldMemory, Timeline, TimelineEvent

RANKS, MESSAGES = 0, 1
"""Process ids: computation has one track a rank, communication may overlap and stands apart."""


def chrome_trace(timeline: Timeline) -> str:
    """JSON in the Trace Event Format, times in microseconds.

    Work is a complete event (``X``) on its rank's track. Messages and sums over replicas are
    asynchronous events (``b``, ``e``), since several can go on at once, and beside work. The
    activations each rank holds are a counter (``C``).
    """
    events: list[dict[str, Any]] = [
        _name("process_name", RANKS, 0, f"ranks ({timeline.source})"),
        _name("process_name", MESSAGES, 0, "messages"),
    ]
    for rank in range(timeline.num_ranks):
        events.append(_name("thread_name", RANKS, rank, f"rank {rank}"))
    for number, event in enumerate(timeline.events):
        events += _trace_events(number, event)
    events += [_counter(held) for held in timeline.memory]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


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
