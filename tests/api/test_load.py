"""The clients of `make load` notice what is lost, wrong or another's, and limits are limits."""

from __future__ import annotations

import asyncio
import json
import threading
from random import Random
from types import SimpleNamespace

import pytest

from benchmarks.load import Result
from benchmarks.loading import heavy, mix
from benchmarks.loading.clients import Task, Told, _read_all
from benchmarks.loading.connection import Answer
from benchmarks.planner import uneven_profile

PLAN = {
    "id": "plan_1", "profile_id": "p", "cluster": {"devices": [{}, {}]},
    "options": {"num_microbatches": 4}, "plan": {"step_time_s": 1.0},
}  # fmt: skip


class Answering:
    """A connection to a server with this one answer."""

    def __init__(self, status: int, body: object, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer = Answer(status, named, json.dumps(body).encode())

    async def ask(self, *_: object) -> Answer:
        return self.answer

    def close(self) -> None:
        pass


def book() -> mix.Book:
    found = mix.Book([("p", 3)], 0, 1, Random(0))
    made = json.dumps(PLAN).encode()
    found.made.append(mix.Made("plan_1", b"{}", "key", mix.digest(made), 1.0))
    return found


RIGHT = {
    "new plan": Answering(201, PLAN, location="/v1/plans/plan_1"),
    "same plan again": Answering(201, PLAN, stagewright_reused="plan"),
    "idempotent replay": Answering(201, PLAN, idempotency_replayed="true"),
    "get plan": Answering(200, PLAN),
    "get profile": Answering(200, {"id": "p", "profile": {"layers": [0, 1, 2]}}),
    "schedule": Answering(200, {}),
    "list": Answering(200, {"plans": [{}]}),
    "what-if": Answering(200, {"plan": {"step_time_s": 1.0}}),
}
WRONG = {
    "new plan": Answering(201, {**PLAN, "profile_id": "q"}, location="/v1/plans/plan_1"),
    "same plan again": Answering(201, PLAN),
    "idempotent replay": Answering(201, PLAN),
    "get plan": Answering(200, {**PLAN, "id": "plan_2"}),
    "get profile": Answering(200, {"id": "q", "profile": {"layers": [0, 1, 2]}}),
    "schedule": Answering(404, {}),
    "list": Answering(200, {"plans": []}),
    "what-if": Answering(200, {"plan": {"step_time_s": 1.1}}),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_an_answer_is_compared_with_what_it_has_to_be(kind):
    asyncio.run(mix.ASK[kind](RIGHT[kind], book()))
    for wrong in (WRONG[kind], Answering(500, {})):
        with pytest.raises(mix.Wrong):
            asyncio.run(mix.ASK[kind](wrong, book()))


def test_a_plan_that_cannot_be_read_afterwards_is_lost(monkeypatch):
    gone = Answering(404, {"plans": [], "next_cursor": None})
    monkeypatch.setattr("benchmarks.loading.clients.Connection", lambda *_: gone)
    told = Told()
    asyncio.run(_read_all(Task("host", 1, "token", [("p", 3)], 1, 1), book(), told))
    assert (told.unread, told.num_wrong) == (2, 2), "not at its address, not in the list"


def test_every_limit_is_one():
    def result(**changed: float) -> list[str]:
        met = {"requests_per_s": 100.0, "p99_s": 0.99, "light_ratio": 5.0, "short_ratio": 2.0}
        return Result("sqlite", 1, 1, **{**met, **changed}).misses()

    assert result() == []
    for changed in (
        {"requests_per_s": 99.0}, {"p99_s": 1.0}, {"light_ratio": 5.1}, {"short_ratio": 2.1},
        {"wrong": 1}, {"unread": 1},
    ):  # fmt: skip
        assert len(result(**changed)) == 1, changed


HEAVY = uneven_profile(3).content_id()
ACTIONS = [{}] * heavy.DRAWN_ACTIONS
HEAVY_RIGHT = {
    "POST /v1/profiles": {"id": HEAVY},
    f"GET /v1/plans/{HEAVY}?format=timeline": {"events": ACTIONS},
    f"GET /v1/plans/{HEAVY}?format=chrome_trace": {"traceEvents": ACTIONS},
    "POST /v1/plans": {"id": HEAVY, "status": "planned"},
}
HEAVY_WRONG = ({"id": ""}, {"events": ACTIONS[1:]}, {"traceEvents": []}, {"status": "infeasible"})


@pytest.mark.parametrize("num_right", range(5))
def test_every_heavy_request_is_compared_with_what_it_has_to_be(monkeypatch, num_right):
    """Cause: beside searches alone, timelines and large bodies could hold light requests up."""
    asked: list[str] = []
    stop, answers = threading.Event(), dict(HEAVY_RIGHT)

    def answer(server, token, path, body=None, headers=None):
        asked.append(f"{'GET' if body is None else 'POST'} {path}")
        if len(asked) == 2 + len(HEAVY_RIGHT):  # two make ready
            stop.set()
        return answers[asked[-1]]

    monkeypatch.setattr(heavy, "LAYERS", 3)
    monkeypatch.setattr(heavy, "UPLOADED_LAYERS", 3)
    monkeypatch.setattr(heavy, "ask", answer)
    load = heavy.Heavy(SimpleNamespace(tokens=["token"]))
    answers |= dict(list(zip(HEAVY_RIGHT, HEAVY_WRONG, strict=True))[num_right:])
    load.start(stop)
    assert load.end() == num_right
    assert asked[2:] == list(HEAVY_RIGHT)[: num_right + 1]
    assert load.num_wrong == len(load.wrong) == (num_right < 4)
