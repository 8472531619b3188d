"""Bodies are counted against their schema before they are validated, and name each member once.

Causes: a million unknown members became as many validation errors; and of two members with one
name, or of two equal query parameters, the last was taken silently.
"""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from pydantic import TypeAdapter, ValidationError

from scripts.hostility.floods import body_types, floods
from stagewright.api.http.json_bodies import MAX_MEMBERS, MAX_NODES, parse_json
from stagewright.api.http.problems import Problem
from stagewright.core.plan.plan import PlanOptions

NUM = 5_000


def test_no_schema_reports_a_flood_one_by_one():
    """Whatever has too many members or items is refused at once, or at the first that is wrong."""
    seen, wrong = set(), {}
    for path, kind in body_types():
        adapter = TypeAdapter(kind)
        for place, body in floods(kind, NUM, seen):
            with suppress(Problem):
                found = parse_json(body().encode(), kind)
                try:
                    adapter.validate_python(found)
                except ValidationError as error:
                    wrong[path + place] = error.error_count()
    assert len(wrong) > 20
    assert {place: count for place, count in wrong.items() if count > NUM // 4} == {}


def test_every_body_is_looked_at():
    paths = {path for path, _ in body_types()}
    assert {"/v1/plans", "/v1/plans/{plan_id}", "/v1/graphs", "/v1/profile-jobs"} <= paths
    assert len(paths) >= 10


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        ({"options": {f"k{n}": 0 for n in range(999)}}, "/options", "999 members, such as 'k0'"),
        ({"clustr": 1, **{f"k{n}": 0 for n in range(999)}}, "", "did you mean 'cluster'"),
        ({"options": {"pins": [{"layer": "a", "stage": 0}] * 10**5}}, "/options/pins", "at most"),
    ],
)
def test_the_first_of_too_many_is_named(client, body, place, words):
    answer = client.post("/v1/plans", json={"cluster": "2xcpu", **body})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error.get("pointer", "") == place
    assert words in error["detail"]


def test_limits_are_exact():
    parse_json(json.dumps({str(n): 0 for n in range(MAX_MEMBERS)}).encode())
    with pytest.raises(Problem, match=f"at most {MAX_MEMBERS}"):
        parse_json(json.dumps({str(n): 0 for n in range(MAX_MEMBERS + 1)}).encode())
    at_limit = b"[" + b"0," * (MAX_NODES - 1) + b"0]"
    assert len(parse_json(at_limit)) == MAX_NODES
    with pytest.raises(Problem, match=f"{MAX_NODES} values"):
        parse_json(at_limit.replace(b"[", b"[0,", 1))


REPEATED = [
    '{"cluster": "2xcpu", "profile": %s, "cluster": "4x24GB"}',
    '{"cluster": "2xcpu", "profile": %s, "clu\\u0073ter": "4x24GB"}',
    '{"cluster": "2xcpu", "profile": %s, "options": {"gap": 0, "gap": 0}}',
    '{"cluster": {"devices": [{"name": "a"}, {"name": "b", "name": "c"}]}, "profile": %s}',
    '{"cluster": "2xcpu", "profile": %s, "": 1, "": 2}',
    '{"cluster": "2xcpu", "profile": %s, "options": {"a": {"b": [{"c": 1, "c": 1}]}}}',
]


@pytest.mark.parametrize("body", REPEATED)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_repeated_member_is_refused(client, profile, body, is_large):
    profile["notes"] = ['a note: with {"quotes": and} \\ colons'] * (9000 if is_large else 1)
    sent = (body % json.dumps(profile)).encode()
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/plans", content=sent, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "in the same object twice" in answer.json()["detail"]


def test_texts_are_no_members(client, profile):
    profile["notes"] = ['{"a": 1, "a": 2}', "\\", '\\"', "\\\\:", "::", '\u2028":']
    profile["layers"][0]["layer"]["name"] = '":\\'
    answer = client.post("/v1/plans", json={"profile": profile, "cluster": "2x24GB"})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/plans?limit=1&limit=2",
        "/v1/plans?search=a&search=b",
        "/v1/profiles?cursor=a&limit=1&cursor=a",
        "/v1/jobs?state=queued&state=queued",
        "/v1/plans/x?format=svg&format=plan",
        "/v1/plans/x/exports/vllm?file=a&file=b",
        "/v1/api-keys?project_id=a&project_id=b",
        "/v1/audit?limit=1&limi%74=1",
        "/plans?search=a&search=b",
    ],
)
def test_a_repeated_parameter_is_refused(client, path):
    answer = client.get(path)
    assert answer.status_code == 422, answer.text
    assert "given 2 times; give it once" in answer.json()["detail"]


def test_a_parameter_of_many_values_is_not(client):
    assert "give it once" not in client.get("/compare?id=plan_1&id=plan_2").text


def test_the_same_options_are_accepted_once():
    found = parse_json(b'{"num_microbatches": 8}', PlanOptions)
    assert PlanOptions.model_validate(found).num_microbatches == 8
