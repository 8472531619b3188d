"""``If-Match`` and ``If-None-Match`` on whatever has an entity tag (RFC 9110, section 13).

Cause: a stale tag changed and deleted all the same, so one of two editors lost what he wrote.
"""

from __future__ import annotations

import json

import pytest

from stagewright.api.http.examples import example_graph

CURRENT, STALE = "current", '"0123456789abcdef0123456789abcdef"'
KINDS = ("plans", "profiles", "graphs")


@pytest.fixture
def stored(client, profile):
    """Path of a stored document of each kind, its entity tag, and what deletes it."""
    plan = client.post("/v1/plans", json={"profile": profile, "cluster": "2x24GB"}).json()
    unplanned = client.post("/v1/profiles", json={**profile, "model": "Other"}).json()
    graph = client.post("/v1/graphs", json=example_graph()).json()
    paths = [
        f"/v1/{kind}/{one['id']}" for kind, one in zip(KINDS, (plan, unplanned, graph), strict=True)
    ]
    tags = [client.get(path).headers["etag"] for path in paths]
    return dict(zip(KINDS, zip(paths, tags, strict=True), strict=True))


def changed(client, method, path, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"content": json.dumps({"notes": "new"})} if method == "PATCH" else {}
    return client.request(
        method, path, headers={"Content-Type": "application/json", **named}, **body
    )


@pytest.mark.parametrize(
    ("sent", "is_made"),
    [
        ("{tag}", True),
        ("*", True),
        (' {stale} , {tag} ,"x"', True),
        ('"a,b", {tag}', True),
        ("{stale}", False),
        ("W/{tag}", False),
        ("{stale}, W/{tag}", False),
        ("unquoted", False),
        ("*, {stale}", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_made_if_a_tag_is_current(client, stored, kind, sent, is_made):
    path, _ = stored[kind]
    for method in ("PATCH", "DELETE") if kind == "plans" else ("DELETE",):
        tag = client.get(path).headers["etag"]
        value = sent.format(tag=tag, stale=STALE)
        answer = changed(client, method, path, If_Match=value)
        assert answer.is_success if is_made else answer.status_code == 412, answer.text
        if not is_made:
            assert answer.json()["type"].endswith(":precondition-failed")
            assert client.get(path).headers["etag"] == tag


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_not_made_to_what_a_client_wants_not_to_be_there(client, stored, kind):
    path, tag = stored[kind]
    for value in ("*", tag, f"W/{tag}"):
        assert changed(client, "DELETE", path, If_None_Match=value).status_code == 412
    assert changed(client, "DELETE", path, If_None_Match=STALE).status_code == 204


def test_labels_change_the_tag(client, stored):
    path, tag = stored["plans"]
    assert changed(client, "PATCH", path, If_Match=tag).status_code == 200
    assert client.get(path).headers["etag"] != tag
    assert changed(client, "PATCH", path, If_Match=tag).status_code == 412


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_may_name_the_tag_too(client, stored, kind):
    path, tag = stored[kind]
    assert client.get(path, headers={"If-Match": tag}).status_code == 200
    assert client.get(path, headers={"If-Match": STALE}).status_code == 412
    assert client.get(path, headers={"If-None-Match": f"W/{tag}"}).status_code == 304


def test_what_is_not_there_is_not_found(client):
    for value in ("*", STALE):
        missing = changed(client, "PATCH", "/v1/plans/plan_0", If_Match=value)
        assert missing.status_code == 404, "a condition counts where the rest would succeed"


def test_what_has_no_tag_matches_none(client):
    key = client.post("/v1/api-keys", json={"name": "k", "scopes": ["read"]}).json()["key"]["id"]
    path = f"/v1/api-keys/{key}"
    assert changed(client, "DELETE", path, If_Match=STALE).status_code == 412
    assert changed(client, "DELETE", path, If_Match="*").status_code == 200
