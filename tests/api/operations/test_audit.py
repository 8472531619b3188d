"""Reading the audit log over HTTP: admins, their own project, page by page."""

from __future__ import annotations

import pytest

from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.api.store.store import Store


@pytest.fixture
def kept():
    return Store(IN_MEMORY)


@pytest.fixture
def holder(make_client, kept):
    """A client with a key of its own, of a project, with some scopes."""

    def holder(project_id, *scopes):
        client = make_client(store=kept, authorized=False)
        secret = kept.keys.create(project_id, name="n", scopes=scopes).secret
        client.headers["Authorization"] = f"Bearer {secret}"
        return client

    return holder


def test_what_somebody_did_can_be_read_newest_first(holder, profile):
    client = holder(DEFAULT_PROJECT, "plan", "admin")
    made = client.post("/v1/profiles", json=profile)
    client.get("/v1/profiles")
    page = client.get("/v1/audit").json()
    refused, created = page["entries"]
    assert (refused["action"], refused["outcome"]) == ("profiles.read", "forbidden")
    assert created["action"] == "profiles.create"
    assert created["object_id"] == made.json()["id"]
    assert created["request_id"] == made.headers["X-Request-ID"]
    assert created["key_id"].startswith("key_")
    assert page["next_cursor"] is None


def test_another_projects_lines_and_strangers_are_not_shown(holder, make_client, kept, profile):
    theirs = kept.projects.create("theirs").id
    holder(theirs, "plan").post("/v1/profiles", json=profile)
    make_client(store=kept, authorized=False).get("/v1/plans")
    assert holder(DEFAULT_PROJECT, "admin").get("/v1/audit").json()["entries"] == []
    (line,) = holder(theirs, "admin").get("/v1/audit").json()["entries"]
    assert line["project_id"] == theirs
    assert len(kept.audit.entries(limit=9).items) == 2


def test_pages_neither_repeat_nor_hide_a_line(holder):
    client = holder(DEFAULT_PROJECT, "admin")
    for _ in range(5):
        client.post("/v1/plans", json={})
    numbers, cursor = [], None
    while True:
        page = client.get(
            "/v1/audit", params={"limit": 2, **({"cursor": cursor} if cursor else {})}
        )
        numbers += [entry["number"] for entry in page.json()["entries"]]
        client.post("/v1/plans", json={})
        cursor = page.json()["next_cursor"]
        if cursor is None:
            break
    assert numbers == [5, 4, 3, 2, 1]


def test_it_needs_admin(holder):
    answer = holder(DEFAULT_PROJECT, "read", "plan", "measure", "metrics").get("/v1/audit")
    assert answer.status_code == 403
    assert 'scope="admin"' in answer.headers["WWW-Authenticate"]


def test_a_cursor_of_another_list_is_refused(holder):
    client = holder(DEFAULT_PROJECT, "admin")
    problem = client.get("/v1/audit", params={"cursor": "nonsense"})
    assert problem.status_code == 422
    assert problem.json()["errors"][0]["parameter"] == "cursor"
