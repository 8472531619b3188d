"""What is sent again, when, and with what; what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.client.request_builders import build_create, build_delete, build_get, build_query
from stagewright.client.retry import delete, send_with_retries
from stagewright.client.sans_io import HttpRequest, TransportFailure
from stagewright.core.errors import (
    DeadlineExceeded,
    NotFound,
    Refused,
    StagewrightError,
    Unreachable,
)
from tests.client.world import World, problem, reply

LOST = TransportFailure("connection reset")
NEVER_LEFT = TransportFailure("connection refused", was_sent=False)
MAKE = build_create("plans", fields={})
MAKE_ONCE_ONLY = HttpRequest("POST", "/v1/api-keys", is_repeatable=False)


@pytest.mark.parametrize("call", [build_get("plans"), build_query("simulations", fields={}), MAKE])
@pytest.mark.parametrize(
    "first",
    [
        LOST,
        NEVER_LEFT,
        TransportFailure("slow", is_timeout=True),
        reply(502),
        problem(503, "database-unreachable"),
        reply(504),
        problem(409, "answer-pending"),
        problem(429, "too-many-requests", retry_after="0"),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again(call, first):
    world = World(first, reply(201))
    assert world.run(send_with_retries(call)).status == 201
    assert world.calls == [call, call]
    assert len(world.slept) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(504, "deadline-exceeded", kinds=("DeadlineExceeded",)), DeadlineExceeded),
        (problem(503, "planning-ended"), Unreachable),
        (problem(429, "too-many-jobs"), Refused),
        (problem(500, "internal-error"), StagewrightError),
        (problem(409, "no-plan"), StagewrightError),
    ],
)
def test_what_would_come_again_is_not(answer, error):
    world = World(answer)
    with pytest.raises(error):
        world.run(send_with_retries(MAKE))
    assert len(world.calls) == 1


@pytest.mark.parametrize("first", [LOST, reply(503), problem(409, "answer-pending")], ids=str)
def test_what_is_not_safe_to_repeat_is_not_repeated(first):
    world = World(first)
    with pytest.raises(StagewrightError):
        world.run(send_with_retries(MAKE_ONCE_ONLY))
    assert len(world.calls) == 1


@pytest.mark.parametrize("first", [NEVER_LEFT, problem(429, "too-many-requests", retry_after="1")])
def test_what_was_never_carried_out_is_repeated_even_then(first):
    world = World(first, reply(201))
    assert world.run(send_with_retries(MAKE_ONCE_ONLY)).status == 201


@pytest.mark.parametrize("first", [LOST, reply(503)], ids=str)
def test_what_a_lost_attempt_has_deleted_is_no_error(first):
    world = World(first, problem(404, "not-found"))
    world.run(delete(build_delete("plans", "plan_0")))
    assert len(world.calls) == 2


@pytest.mark.parametrize(
    "before", [[], [NEVER_LEFT], [problem(429, "too-many-requests", retry_after="1")]]
)
def test_what_was_not_there_to_delete_is(before):
    world = World(*before, problem(404, "not-found"))
    with pytest.raises(NotFound):
        world.run(delete(build_delete("plans", "plan_0")))


def test_retry_after_is_kept_to():
    world = World(problem(429, "too-many-requests", retry_after="3"), reply(200))
    world.run(send_with_retries(build_get("plans")))
    assert world.slept == [3.0]


def test_a_wait_beyond_the_time_allowed_is_an_error_at_once():
    world = World(problem(429, "too-many-requests", "ask again in 60 s", retry_after="60"))
    with pytest.raises(Refused, match="ask again in 60 s"):
        world.run(send_with_retries(build_get("plans")))
    assert world.slept == []


def test_pauses_double_and_all_attempts_together_keep_the_time():
    world = World(*[LOST] * 50)
    started_s = world.now_s
    with pytest.raises(Unreachable, match=r"GET /v1/plans.*connection reset.*stagewright serve"):
        world.run(send_with_retries(build_get("plans")))
    assert world.slept[:4] == [0.125, 0.25, 0.5, 1.0]
    assert 5 < world.now_s - started_s <= 10


def test_a_service_that_is_not_there_is_given_up_sooner_than_one_that_is_slow():
    world = World(*[NEVER_LEFT] * 50, timeout_s=600)
    with pytest.raises(Unreachable, match="connection refused"):
        world.run(send_with_retries(build_get("plans")))
    assert 10 < sum(world.slept) <= 15
    world = World(*[LOST, NEVER_LEFT, NEVER_LEFT] * 8, reply(200), timeout_s=600)
    assert world.run(send_with_retries(build_get("plans"))).status == 200


def test_it_is_said_once_that_a_service_is_waited_for_and_in_the_end_where_it_was_looked_for():
    world, said = World(*[NEVER_LEFT] * 50), []
    world.retry_budget = replace(world.retry_budget, address="http://here:1", on_wait=said.append)
    with pytest.raises(Unreachable, match=r"cannot reach http://here:1 \(conn.*--server"):
        world.run(send_with_retries(build_get("plans")))
    assert said == ["waiting for http://here:1 (connection refused)"]


def test_an_answer_that_takes_too_long_says_what_to_give():
    world = World(TransportFailure("timed out", is_timeout=True), timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s.*timeout_s"):
        world.run(send_with_retries(build_get("plans")))


def test_every_creating_call_has_a_key_of_its_own():
    keys = {build_create("plans", fields={}).headers["Idempotency-Key"] for _ in range(5)}
    assert len(keys) == 5
