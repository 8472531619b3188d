"""Keys over HTTP: made once seen, listed without secrets, revoked at once."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from stagewright.api.auth.scopes import SCOPES
from stagewright.api.routes import keys as routes_keys
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.records import Quotas
from stagewright.api.store.store import Store

ALL = list(SCOPES)


@pytest.fixture
def kept():
    """The service's store, to look into."""
    return Store(IN_MEMORY)


@pytest.fixture
def client(make_client, kept):
    return make_client(store=kept)


@pytest.fixture
def holder(make_client, kept):
    """A client with a key of its own."""

    def make(*scopes, project="project_default", quotas=None):
        made = kept.keys.create(project, name="test", scopes=scopes, quotas=quotas)
        other = make_client(store=kept, authorized=False)
        other.headers["Authorization"] = f"Bearer {made.secret}"
        return other

    return make


def test_a_key_made_over_http_opens_what_it_says(client, make_client, kept):
    answer = client.post("/v1/api-keys", json={"name": "ci", "scopes": ["read"]})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    made = answer.json()
    assert answer.headers["Location"] == f"/v1/api-keys/{made['key']['id']}"
    other = make_client(store=kept, authorized=False)
    other.headers["Authorization"] = f"Bearer {made['secret']}"
    assert other.get("/v1/plans").status_code == 200
    assert other.post("/v1/profiles", json={}).status_code == 403

    revoked = client.delete(answer.headers["Location"])
    assert revoked.status_code == 200
    assert revoked.json()["revoked_at"] is not None
    assert other.get("/v1/plans").status_code == 401
    assert client.delete(answer.headers["Location"]).json() == revoked.json()


def test_the_secret_is_seen_once_and_kept_nowhere(client, kept, tmp_path):
    secret = client.post("/v1/api-keys", json={"name": "ci", "scopes": ["read"]}).json()["secret"]
    listed = client.get("/v1/api-keys")
    assert [key["name"] for key in listed.json()["keys"]] == ["ci"]
    assert secret not in listed.text
    entries = kept.audit.entries(limit=10).items
    assert secret not in "".join(entry.model_dump_json() for entry in entries)


def test_nobody_gives_what_they_have_not(holder):
    admin = holder("admin", "read")
    made = admin.post("/v1/api-keys", json={"name": "x", "scopes": ["read"]})
    assert made.status_code == 201
    refused = admin.post("/v1/api-keys", json={"name": "x", "scopes": ["read", "plan"]})
    assert refused.status_code == 403
    assert "'plan'" in refused.json()["detail"]


@pytest.mark.parametrize("method_path", ["GET /v1/api-keys", "POST /v1/api-keys",
                                         "DELETE /v1/api-keys/key_1"])  # fmt: skip
def test_keys_need_admin(holder, method_path):
    method, path = method_path.split()
    answer = holder("read", "plan", "measure").request(method, path)
    assert answer.status_code == 403
    assert 'scope="admin"' in answer.headers["WWW-Authenticate"]


def test_another_projects_keys_are_neither_listed_nor_revoked(client, holder, kept):
    theirs = kept.projects.create("theirs")
    admin = holder(*ALL, project=theirs.id)
    made = admin.post("/v1/api-keys", json={"name": "t", "scopes": ["read"]}).json()
    assert made["key"]["project_id"] == theirs.id
    assert client.get("/v1/api-keys").json()["keys"] == []
    assert client.delete(f"/v1/api-keys/{made['key']['id']}").status_code == 404
    assert len(admin.get("/v1/api-keys").json()["keys"]) == 2


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"scopes": []}, "/scopes"),
        ({"scopes": ["everything"]}, "/scopes/0"),
        ({"name": ""}, "/name"),
        ({"name": "   "}, "/name"),
        ({"name": "x" * 201}, "/name"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "/expires_at"),
        ({"expires_at": "2090-01-01T00:00:00"}, "/expires_at"),
        ({"quotas": {"max_requests_per_minute": 0}}, "/quotas/max_requests_per_minute"),
        ({"project_id": "project_other"}, "/project_id"),
    ],
)
def test_what_does_not_fit_is_named(client, change, pointer):
    answer = client.post("/v1/api-keys", json={"name": "n", "scopes": ["read"], **change})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_a_key_expires(client, kept, make_client):
    soon = datetime.now(UTC) + timedelta(days=1)
    answer = client.post(
        "/v1/api-keys", json={"name": "n", "scopes": ["read"], "expires_at": soon.isoformat()}
    ).json()
    assert datetime.fromisoformat(answer["key"]["expires_at"]) == soon
    expired = kept.keys.create(
        "project_default", name="old", scopes=ALL, expires_at=datetime(2020, 1, 1, tzinfo=UTC)
    )
    other = make_client(store=kept, authorized=False)
    headers = {"Authorization": f"Bearer {expired.secret}"}
    assert other.get("/v1/plans", headers=headers).status_code == 401


def test_there_is_a_limit_to_the_keys_of_a_project(client, monkeypatch):
    monkeypatch.setattr(routes_keys, "MAX_LIVE_KEYS", 2)
    body = {"name": "n", "scopes": ["read"]}
    first = client.post("/v1/api-keys", json=body).json()
    assert client.post("/v1/api-keys", json=body).status_code == 201
    refused = client.post("/v1/api-keys", json=body)
    assert (refused.status_code, refused.json()["title"]) == (409, "Too many keys")
    client.delete(f"/v1/api-keys/{first['key']['id']}")
    assert client.post("/v1/api-keys", json=body).status_code == 201


def test_making_revoking_and_being_refused_are_in_the_audit_log(client, holder, kept, profile):
    made = client.post("/v1/api-keys", json={"name": "n", "scopes": ["read"]}).json()["key"]["id"]
    client.delete(f"/v1/api-keys/{made}")
    stored = client.post("/v1/profiles", json=profile).json()["id"]
    client.get("/v1/plans")
    client.post("/v1/profiles", json={})
    reader = holder("read")
    reader.post("/v1/plans", json={})
    client.get("/v1/plans", headers={"Authorization": "Bearer wrong"})
    entries = kept.audit.entries(limit=100).items[::-1]
    assert [(entry.action, entry.outcome, entry.object_id) for entry in entries] == [
        ("api-keys.create", "ok", made),
        ("api-keys.delete", "ok", made),
        ("profiles.create", "ok", stored),
        ("plans.create", "forbidden", None),
        ("plans.read", "unauthorized", None),
    ]
    assert entries[0].address == "testclient"
    assert entries[3].key_id == kept.keys.list("project_default")[1].id
    assert entries[4].project_id is None


def test_a_flood_of_refusals_does_not_fill_the_log(client, kept):
    for _ in range(100):
        client.get("/v1/plans", headers={"Authorization": "Basic wrong"})
    assert 60 <= len(kept.audit.entries(limit=200).items) <= 65


def test_an_audit_log_that_fails_is_told_to_the_servers_log(client, kept, monkeypatch, caplog):
    from stagewright.api.store.errors import StoreUnavailable

    def fail(event):
        raise StoreUnavailable("gone")

    monkeypatch.setattr(kept.audit, "add", fail)
    answer = client.post("/v1/api-keys", json={"name": "n", "scopes": ["read"]})
    assert answer.status_code == 201
    assert "api-keys.create" in caplog.text


def test_requests_of_a_key_are_counted(holder):
    client = holder("read", quotas=Quotas(max_requests_per_minute=3))
    answers = [client.get("/v1/plans") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["RateLimit-Policy"] == '"minute";q=3;w=60'
    assert answers[0].headers["RateLimit"].startswith('"minute";r=2;t=')
    assert int(answers[3].headers["Retry-After"]) in range(1, 21)
    assert answers[3].headers["Content-Type"] == "application/problem+json"
    assert answers[3].headers["RateLimit"].startswith('"minute";r=0;t=')
    assert "3 requests a minute" in answers[3].json()["detail"]
    assert json.loads(answers[3].text)["status"] == 429


def test_a_key_without_quota_has_the_servers_and_the_servers_token_has_none(client, holder):
    assert "RateLimit" not in client.get("/v1/plans").headers
    assert holder("read").get("/v1/plans").headers["RateLimit-Policy"] == '"minute";q=1200;w=60'


def test_keys_are_counted_apart(holder):
    quotas = Quotas(max_requests_per_minute=1)
    first, second = holder("read", quotas=quotas), holder("read", quotas=quotas)
    assert first.get("/v1/plans").status_code == 200
    assert second.get("/v1/plans").status_code == 200
    assert first.get("/v1/plans").status_code == 429


def test_keys_are_listed_by_pages_newest_first(client):
    made = [
        client.post("/v1/api-keys", json={"name": str(n), "scopes": ["read"]}).json()["key"]["id"]
        for n in range(5)
    ]
    seen, cursor = [], None
    while True:
        query = {"limit": 2} if cursor is None else {"limit": 2, "cursor": cursor}
        page = client.get("/v1/api-keys", params=query).json()
        assert len(page["keys"]) <= 2
        seen += [key["id"] for key in page["keys"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert seen == made[::-1]
    assert client.get("/v1/api-keys", params={"cursor": "x"}).status_code == 422
