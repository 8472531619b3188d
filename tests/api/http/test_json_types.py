"""Values of another type than documented are refused, also where pydantic would convert them."""

from __future__ import annotations

import pytest

from stagewright.core.errors import DeadlineExceeded


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("/options/num_microbatches", True),
        ("/options/num_microbatches", "8"),
        ("/deadline_s", "5"),
        ("/deadline_s", True),
        ("/profile/layers/0/forward/median_s", "0.001"),
        ("/profile/layers/0/output_bytes", False),
        ("/options/nested", 1),
    ],
)
def test_what_could_be_converted_is_refused_and_named(client, profile, place, value):
    body = {"profile": profile, "cluster": "2x24GB", "options": {}}
    here = body
    *path, last = place[1:].split("/")
    for part in path:
        here = here[int(part) if isinstance(here, list) else part]
    here[last] = value
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    assert [error["pointer"] for error in response.json()["errors"]] == [place]


def test_whole_numbers_may_be_written_with_a_point(client, profile):
    body = {"profile": profile, "cluster": "2x24GB", "options": {"num_microbatches": 8.0}}
    made = client.post("/v1/plans", json=body)
    assert (made.status_code, made.json()["options"]["num_microbatches"]) == (201, 8)


def test_allow_names_every_method_of_a_path(client):
    for path, allowed in (
        ("/v1/plans", "GET, POST"),
        ("/v1/api-keys/key_1", "DELETE"),
        ("/v1/plans/plan_1", "DELETE, GET, PATCH"),
    ):
        response = client.request("PUT", path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.in_threads
def test_no_plan_in_the_time_a_request_allows_is_the_requests_fault(client, profile, monkeypatch):
    def late(*_, **__):
        raise DeadlineExceeded("no plan was found before the deadline")

    monkeypatch.setattr("stagewright.api.planning.decision.plan", late)
    body = {"profile": profile, "cluster": "2xcpu", "deadline_s": 0.5}
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    assert response.json()["type"].endswith(":deadline-exceeded")
    assert response.json()["errors"][0]["pointer"] == "/deadline_s"


def test_a_trace_is_documented_as_one(client):
    answers = client.get("/openapi.json").json()["paths"]["/v1/plans/{plan_id}"]["get"]
    schema = answers["responses"]["200"]["content"]["application/json"]["schema"]
    named = [entry["$ref"].rpartition("/")[2] for entry in schema["anyOf"]]
    assert named == ["StoredPlan", "Plan", "Schedule", "Timeline", "TraceFile"]
