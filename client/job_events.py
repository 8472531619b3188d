"""Following a job's events to their end, over connections that break."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any, TypeAlias

from ..core.errors import DeadlineExceeded
from ..core.service.jobs import JobEvent, JobView
from .errors import error_of
from .retry import TRANSIENT, error_for, exchange
from .sans_io import Call, Failure, Patience, Reply, Sleep, Step, Steps, hear, listen, own_patience
from .sse import EventParser

SILENCE_S = 60.0
"""A live stream says something every 15 s."""

Stream: TypeAlias = Generator[Step | JobEvent, Any, None]
"""Steps, and between them events for whoever listens."""


def job_call(job_id: str) -> Call:
    """Ask how a job stands."""
    return Call("GET", f"/v1/jobs/{job_id}")


def events_call(job_id: str, after: int) -> Call:
    """Ask for a job's events after one of them."""
    headers = {"Accept": "text/event-stream"}
    if after:
        headers["Last-Event-ID"] = str(after)
    return Call("GET", f"/v1/jobs/{job_id}/events", headers=headers)


def following(job_id: str, after: int = 0, limit_s: float | None = None) -> Stream:
    """Every event of a job after one of them, each once and in order, until its last.

    A connection that ends before that is opened again where it broke. The job's own state
    decides whether it is over: an event that says so may have been heard before.

    Args:
        job_id: Whose events.
        after: The last one known; 0 for none.
        limit_s: How long to listen at most.

    Raises:
        NotFound: There is no such job.
        DeadlineExceeded: It was not over by the end; it goes on.
        StagewrightError: The service was silent for longer than a client waits for an answer.
    """
    patience = yield from own_patience()
    end = inf if limit_s is None else patience.clock() + limit_s
    heard, attempt = after, 0
    quiet_since = patience.clock()
    while True:
        call = events_call(job_id, heard)
        left_s = _left_s(job_id, patience, end)
        outcome = yield from listen(call, min(SILENCE_S, left_s))
        if isinstance(outcome, Reply) and outcome.is_success:
            parser = EventParser()
            while isinstance(text := (yield from hear()), str) and text:
                quiet_since = patience.clock()
                for event in parser.feed(text):
                    if event.number > heard:
                        heard, attempt = event.number, 0
                        yield event
                        if event.is_final:
                            return
                _left_s(job_id, patience, end)
            if isinstance(text, str) and (yield from _job(job_id)).is_finished:
                return
            outcome = text if isinstance(text, Failure) else Failure("the stream ended early")
        elif isinstance(outcome, Reply) and not _is_passing(outcome):
            raise error_of(outcome, call)
        attempt += 1
        pause_s = patience.delay_s(attempt)
        if patience.clock() + pause_s - quiet_since > patience.timeout_s:
            raise error_for(call, outcome, patience)
        yield Sleep(min(pause_s, _left_s(job_id, patience, end)))


def _left_s(job_id: str, patience: Patience, end: float) -> float:
    """Seconds until the end."""
    left_s = end - patience.clock()
    if left_s <= 0:
        raise DeadlineExceeded(
            f"job {job_id} is not done yet; it goes on: wait for it again, or cancel it"
        )
    return left_s


def _is_passing(reply: Reply) -> bool:
    return reply.status in TRANSIENT or reply.status == 429


def _job(job_id: str) -> Steps[JobView]:
    return (yield from exchange(job_call(job_id))).read(JobView)


def each(stream: Stream, take: Callable[[JobEvent], None]) -> Steps[None]:
    """Carry a stream's steps out and hand its events over."""
    answer: Any = None
    while True:
        try:
            found = stream.send(answer)
        except StopIteration:
            return
        if isinstance(found, JobEvent):
            take(found)
            answer = None
        else:
            answer = yield found
