"""A job's event stream (server-sent events), resumed whenever the connection breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import Any, TypeAlias

from ..core.errors import DeadlineExceeded, StagewrightError
from ..core.service.jobs import JobEvent, JobView
from .errors import error_from_reply
from .request_builders import build_get
from .retry import TRANSIENT, ask, final_error
from .sans_io import (
    HttpReply,
    HttpRequest,
    RetryBudget,
    Sleep,
    Step,
    Steps,
    TransportFailure,
    get_retry_budget,
    open_stream,
    read_stream,
)

MAX_PENDING_CHARACTERS = 2**20
"""Longest line accepted; keeps a misbehaving server from filling the client's memory."""


class EventParser:
    """Incremental parser: takes text in chunks of any size and yields complete events.

    An incomplete event at the end of the stream is discarded, as the standard says.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._fields: dict[str, str] = {}

    def feed(self, text: str) -> Iterator[JobEvent]:
        """Yield the events that a chunk of text completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > MAX_PENDING_CHARACTERS:
            raise StagewrightError("the service's event stream has an overlong line")
        for line in (entry.removesuffix("\r") for entry in lines):
            if line:
                self._take(line)
            elif fields := self._fields:
                self._fields = {}
                if "data" in fields:
                    yield _event(fields)

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        if not name:
            return  # a line that starts with a colon is a comment: the service's heartbeat
        value = value.removeprefix(" ")
        if name == "data" and "data" in self._fields:
            value = f"{self._fields['data']}\n{value}"
        self._fields[name] = value


def _event(fields: dict[str, str]) -> JobEvent:
    try:
        return JobEvent.model_validate(
            {
                "number": int(fields["id"]),
                "kind": fields["event"],
                "data": json.loads(fields["data"]),
            }
        )
    except (KeyError, ValueError) as error:
        raise StagewrightError(f"the service sent an invalid event: {error}") from None


SILENCE_S = 60.0
"""Longest silence on an open stream; the service sends a comment every 15 s."""

EventStream: TypeAlias = Generator[Step | JobEvent, Any, None]
"""Steps, interleaved with the events that the caller receives."""


def build_events_request(job_id: str, after: int) -> HttpRequest:
    """Build the request for a job's events after the one numbered ``after``."""
    headers = {"Accept": "text/event-stream"}
    if after:
        headers["Last-Event-ID"] = str(after)
    return HttpRequest("GET", f"/v1/jobs/{job_id}/events", headers=headers)


def follow_events(job_id: str, after: int = 0, limit_s: float | None = None) -> EventStream:
    """Yield every event of a job exactly once, in order, until its final one.

    Events up to number ``after`` are skipped. Raises `DeadlineExceeded` if the job does not finish
    within ``limit_s``; it keeps running.
    """
    budget = yield from get_retry_budget()
    end = inf if limit_s is None else budget.clock() + limit_s
    heard, attempt = after, 0
    quiet_since = budget.clock()
    # Each turn of the loop is one connection. `heard` only grows, so that a resumed stream, which
    # may repeat events, yields none twice.
    while True:
        call = build_events_request(job_id, heard)
        left_s = _left_s(job_id, budget, end)
        outcome = yield from open_stream(call, min(SILENCE_S, left_s))
        if isinstance(outcome, HttpReply) and outcome.is_success:
            parser = EventParser()
            while isinstance(text := (yield from read_stream()), str) and text:
                quiet_since = budget.clock()
                for event in parser.feed(text):
                    if event.number > heard:
                        heard, attempt = event.number, 0
                        yield event
                        if event.is_final:
                            return
                _left_s(job_id, budget, end)
            if isinstance(text, TransportFailure):
                outcome = text
            else:
                # The final event may be one that was already seen, so ask for the job itself.
                job = yield from ask(build_get("jobs", job_id), JobView)
                if job.is_finished:
                    return
                outcome = TransportFailure("the stream ended early")
        elif isinstance(outcome, HttpReply) and outcome.status not in (*TRANSIENT, 429):
            raise error_from_reply(outcome, call)
        attempt += 1
        pause_s = budget.delay_s(attempt)
        # The time limit counts from the last sign of life, not from the start: a job may take days.
        if budget.clock() + pause_s - quiet_since > budget.timeout_s:
            raise final_error(call, outcome, budget)
        yield Sleep(min(pause_s, _left_s(job_id, budget, end)))


def _left_s(job_id: str, budget: RetryBudget, end: float) -> float:
    """Return the seconds until ``end``; raise `DeadlineExceeded` once it has passed."""
    left_s = end - budget.clock()
    if left_s <= 0:
        raise DeadlineExceeded(f"job {job_id} is still running; wait for it again, or cancel it")
    return left_s


def dispatch_events(stream: EventStream, take: Callable[[JobEvent], None]) -> Steps[None]:
    """Forward a stream's steps and pass its events to ``take``."""
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
