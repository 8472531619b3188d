"""Steps carried out with a clock and answers of the test's own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from stagewright.client.retry import RetryBudget
from stagewright.client.sans_io import (
    GetRetryBudget,
    HttpReply,
    HttpRequest,
    OpenStream,
    ReadStream,
    Send,
    Sleep,
)
from stagewright.core.service.jobs import JobEvent
from stagewright.core.service.problems import TYPE_PREFIX


class World:
    """Gives scripted answers; time passes only by sleeping."""

    def __init__(self, *answers: object, timeout_s: float = 10.0) -> None:
        self.answers = deque(answers)
        self.now_s = 100.0
        self.retry_budget = RetryBudget(timeout_s, lambda: self.now_s, jitter=lambda: 0.0)
        self.calls: list[HttpRequest] = []
        self.slept: list[float] = []

    def perform(self, step: object) -> object:
        match step:
            case GetRetryBudget():
                return self.retry_budget
            case Sleep(time_s):
                self.slept.append(time_s)
                self.now_s += time_s
                return None
            case Send(call, _) | OpenStream(call, _):
                self.calls.append(call)
                return self.answers.popleft()
            case ReadStream():
                return self.answers.popleft()
        raise AssertionError(step)

    def run(self, steps: Any) -> Any:
        answer: object = None
        try:
            while True:
                answer = self.perform(steps.send(answer))
        except StopIteration as end:
            return end.value

    def events(self, stream: Any) -> Iterable[JobEvent]:
        answer: object = None
        while True:
            try:
                found = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(found, JobEvent):
                yield found
            else:
                answer = self.perform(found)


def reply(status: int, body: object = None, **headers: str) -> HttpReply:
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpReply(status, found, json.dumps(body if body is not None else {}).encode())


def problem(
    status: int,
    kind: str,
    detail: str = "no",
    errors: object = (),
    kinds: tuple[str, ...] = (),
    **headers: str,
) -> HttpReply:
    body = {
        "type": TYPE_PREFIX + kind, "title": kind, "status": status, "detail": detail,
        "errors": list(errors), "kinds": kinds,
    }  # fmt: skip
    return reply(status, body, **headers)


def job(state: str, **fields: object) -> dict[str, object]:
    return {
        "id": "job_1", "kind": "profile", "state": state, "attempt": 1,
        "created_at": "2025-01-01T00:00:00Z", **fields,
    }  # fmt: skip
