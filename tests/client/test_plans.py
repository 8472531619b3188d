"""Refusals are this library's exceptions; answers are read by what is known of them."""

from __future__ import annotations

import pytest

from stagewright.client.errors import error_from_reply
from stagewright.client.sans_io import HttpReply
from stagewright.core.errors import (
    CaptureError,
    InvalidInput,
    MeasurementError,
    NotFound,
    OutOfMemory,
    Refused,
    StagewrightError,
    Unreachable,
)
from stagewright.core.service.documents import PlanList
from tests.client.world import problem, reply


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(404, "not-found"), NotFound),
        (problem(401, "unauthorized"), Refused),
        (problem(403, "forbidden"), Refused),
        (problem(422, "capture-failed", kinds=("CaptureError",)), CaptureError),
        (problem(422, "measurement-failed", kinds=("MeasurementError",)), MeasurementError),
        (problem(422, "out-of-memory", kinds=("OutOfMemory", "MeasurementError")), OutOfMemory),
        (problem(413, "body-too-large"), InvalidInput),
        (problem(503, "database-unreachable"), Unreachable),
        (problem(500, "internal-error"), StagewrightError),
        (HttpReply(502, {}, b"<html>Bad gateway"), Unreachable),
        (HttpReply(301, {}, b""), StagewrightError),
    ],
)
def test_each_refusal_is_the_exception_that_says_what_to_do(answer, error):
    assert type(error_from_reply(answer, "GET /v1/plans")) is error


def test_a_field_at_fault_is_pointed_at_and_all_are_told():
    errors = [
        {"pointer": "/options/num_microbatches", "detail": "at least 1"},
        {"pointer": "/cluster", "detail": "no devices"},
        {"parameter": "limit", "detail": "at most 500"},
    ]
    found = error_from_reply(problem(422, "invalid-input", "3 fields do not fit", errors), "POST")
    assert isinstance(found, InvalidInput)
    assert found.field == "/options/num_microbatches"
    assert str(found).splitlines() == [
        "3 fields do not fit",
        "  /options/num_microbatches: at least 1",
        "  /cluster: no devices",
        "  limit: at most 500",
    ]


def test_what_the_service_cannot_know_is_added():
    assert "STAGEWRIGHT_TOKEN" in str(
        error_from_reply(problem(401, "unauthorized", "no key"), "GET")
    )
    needs = problem(422, "measurement-failed", "it needs transformers; run pip install ...")
    assert str(error_from_reply(needs, "POST")).startswith("on the service: it needs transformers")
    foreign = str(error_from_reply(HttpReply(502, {}, b"<html>Bad gateway"), "GET /v1/plans"))
    assert "GET /v1/plans returned 502, but not from Stagewright: '<html>Bad gateway'" in foreign


def test_fields_of_a_later_release_are_passed_over():
    line = {"id": "plan_1", "created_at": "2025-01-01T00:00:00Z", "status": "planned"}
    body = {"plans": [{**line, "profile_id": "p", "new_in_line": 1}], "new": {"a": 1}}
    assert reply(200, body).read(PlanList).plans[0].id == "plan_1"
    with pytest.raises(StagewrightError, match="not a valid PlanList; is it of another release"):
        reply(200, {"profiles": []}).read(PlanList)
