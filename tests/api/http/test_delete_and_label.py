"""Stored documents are deleted, and plans named, tagged and noted, over HTTP."""

from __future__ import annotations

import pytest

from tests.api.stored import a_graph


@pytest.fixture
def planned(client, profile):
    return client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()


def test_a_deleted_plan_is_gone_and_planned_anew(client, profile, planned):
    path = f"/v1/plans/{planned['id']}"
    in_use = client.delete(f"/v1/profiles/{planned['profile_id']}")
    assert (in_use.status_code, in_use.json()["type"]) == (
        409,
        "urn:problem-type:stagewright:profile-in-use",
    )
    assert f"of 1 plan, such as {planned['id']}" in in_use.json()["detail"]
    assert client.get(f"{path}/view").status_code == 200, "drawings are kept in memory"
    assert client.delete(path).status_code == 204
    for gone in (path, f"{path}?format=svg", f"{path}/view"):
        assert client.get(gone).status_code == 404
    assert client.delete(path).status_code == 404
    assert client.get("/v1/plans").json()["plans"] == []
    again = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"})
    assert "Stagewright-Reused" not in again.headers
    assert again.json()["id"] == planned["id"]


def test_profiles_and_graphs_are_deleted(client, profile):
    graph = a_graph().model_dump(mode="json")
    for path, body in (("/v1/profiles", profile), ("/v1/graphs", graph)):
        place = client.post(path, json=body).headers["Location"]
        assert client.delete(place).status_code == 204
        assert client.get(place).status_code == 404
        assert client.get(path).json()[path.rpartition("/")[2]] == []


def test_a_profile_deleted_during_the_search_is_named(client, profile, planned, monkeypatch):
    stored = client.app.state.store.documents
    put = stored.put_plan

    def put_late(project, record, **given):
        stored.delete("plan", project, planned["id"])
        stored.delete("profile", project, record.profile_id)
        return put(project, record, **given)

    monkeypatch.setattr(stored, "put_plan", put_late)
    answer = client.post("/v1/plans", json={"profile": profile, "cluster": "3xcpu"})
    assert answer.status_code == 422
    assert "it was deleted during the search; ask again" in answer.json()["detail"]


def test_labels_are_changed_one_by_one_and_found(client, planned):
    path = f"/v1/plans/{planned['id']}"
    assert (planned["name"], planned["tags"], planned["notes"]) == (None, [], None)
    before = client.get(path)
    labels = {"name": "nightly run", "tags": ["team-a", "h100"], "notes": "Replaces May's."}
    changed = client.patch(path, json=labels)
    assert changed.status_code == 200
    assert labels.items() <= changed.json().items()
    after = client.get(path, headers={"If-None-Match": before.headers["ETag"]})
    assert after.status_code == 200, "the tag follows the labels"
    assert labels.items() <= after.json().items()
    client.patch(path, json={"name": None})
    (row,) = client.get("/v1/plans", params={"search": "TEAM-A"}).json()["plans"]
    assert (row["id"], row["name"], row["notes"]) == (planned["id"], None, "Replaces May's.")
    assert client.get("/v1/plans", params={"search": "nightly"}).json()["plans"] == []
    assert "team-a" in client.get("/plans").text


@pytest.mark.parametrize(
    ("labels", "pointer"),
    [
        ({"name": ""}, "/name"),
        ({"name": "x" * 201}, "/name"),
        *(({"name": f"a{one}b"}, "/name") for one in "\0\n\x1b\x7f\x85"),
        ({"tags": ["two words"]}, "/tags/0"),
        ({"tags": ["x"] * 21}, "/tags"),
        *(({"tags": [f"a{one}b"]}, "/tags/0") for one in "\0\x1c\x1d\x1e\x1f\x7f\x85\u2028"),
        ({"notes": "x" * 4001}, "/notes"),
        ({"title": "x"}, "/title"),
    ],
)
def test_labels_are_bounded(client, planned, labels, pointer):
    answer = client.patch(f"/v1/plans/{planned['id']}", json=labels)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize("path", ["/v1/projects", "/v1/api-keys"])
def test_a_control_character_in_a_name_is_refused_and_pointed_out(client, path):
    """A NUL was stored as U+FFFD, and nothing said so."""
    scopes = {"scopes": ["read"]} if path == "/v1/api-keys" else {}
    answer = client.post(path, json={"name": "team\0a", **scopes})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == "/name"
    words = "contains the control character U+0000 at position 4; remove it"
    assert error["detail"] == words


def test_projects_are_made_with_the_servers_token_and_get_their_first_key(client, make_client):
    made = client.post("/v1/projects", json={"name": "team-a"})
    assert made.status_code == 201
    project_id = made.json()["id"]
    twice = client.post("/v1/projects", json={"name": "team-a"})
    assert (twice.status_code, twice.json()["errors"][0]["pointer"]) == (422, "/name")
    asked = {"project_id": project_id, "name": "first", "scopes": ["read", "plan", "admin"]}
    key = client.post("/v1/api-keys", json=asked).json()
    assert key["key"]["project_id"] == project_id
    theirs = make_client(store=client.app.state.store, authorized=False)
    theirs.headers["Authorization"] = f"Bearer {key['secret']}"
    assert [one["name"] for one in theirs.get("/v1/projects").json()["projects"]] == ["team-a"]
    assert len(client.get("/v1/projects").json()["projects"]) == 2
    own = {"name": "second", "scopes": ["read"]}
    assert theirs.post("/v1/api-keys", json=own).status_code == 201
    # A key is its project's: it neither makes others nor sees theirs.
    for refused in (
        theirs.post("/v1/projects", json={"name": "team-b"}),
        theirs.post("/v1/api-keys", json={**own, "project_id": "project_default"}),
        theirs.get("/v1/api-keys", params={"project_id": "project_default"}),
        theirs.delete("/v1/api-keys/key_1", params={"project_id": "project_default"}),
    ):
        assert refused.status_code == 403
        assert "needs the server's own token" in refused.json()["detail"]
    unknown = client.post("/v1/api-keys", json={**own, "project_id": "project_none"})
    assert unknown.json()["errors"][0]["pointer"] == "/project_id"
    ours = {"project_id": project_id}
    assert len(client.get("/v1/api-keys", params=ours).json()["keys"]) == 2
    revoked = client.delete(f"/v1/api-keys/{key['key']['id']}", params=ours)
    assert revoked.json()["revoked_at"] is not None
    assert theirs.get("/v1/plans").status_code == 401
