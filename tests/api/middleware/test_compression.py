"""What is packed, and that tags stay right."""

from __future__ import annotations

import gzip

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.testclient import TestClient

from stagewright.api.middleware.browser_responses import MIN_BYTES, Compression, accepts_gzip

LARGE = b'{"numbers": [1, 2, 3]}' * 1000


async def answer(scope, receive, send):
    """What a path says: how long, and of which kind."""
    name = scope["path"].split("/")[2]
    headers = {"ETag": '"tag"'}
    if name == "held":
        response = Response(None, 304, headers)
    elif name == "events":
        pieces = iter([LARGE, LARGE])
        response = StreamingResponse(pieces, media_type="text/event-stream", headers=headers)
    elif name == "pieces":
        response = StreamingResponse(iter([LARGE, b"end"]), media_type="text/csv", headers=headers)
    elif name == "small":
        response = Response(LARGE[: MIN_BYTES - 1], 200, headers, "application/json")
    elif name == "binary":
        response = Response(LARGE, 200, headers, "application/octet-stream")
    else:
        response = Response(LARGE * 4, 200, headers, "application/json")
    await response(scope, receive, send)


@pytest.fixture
def client():
    return TestClient(Compression(answer))


def test_a_large_answer_is_packed_and_its_tag_is_weak(client):
    found = client.get("/plans/large")
    assert found.headers["Content-Encoding"] == "gzip"
    assert found.headers["ETag"] == 'W/"tag"'
    assert found.headers["Vary"] == "Accept-Encoding"
    assert int(found.headers["Content-Length"]) < len(LARGE) / 5
    assert found.content == LARGE * 4
    with client.stream("GET", "/plans/large") as raw:
        assert gzip.decompress(b"".join(raw.iter_raw())) == LARGE * 4


@pytest.mark.parametrize("name", ["small", "binary", "events", "pieces"])
def test_what_would_gain_nothing_goes_as_it_is(client, name):
    found = client.get(f"/plans/{name}")
    assert "Content-Encoding" not in found.headers
    assert found.headers["ETag"] == '"tag"'
    assert found.headers["Vary"] == "Accept-Encoding"


def test_who_does_not_take_it_gets_it_plain(client):
    for taken in ("identity", "gzip;q=0", "br, gzip; q=0.0", ""):
        found = client.get("/plans/large", headers={"Accept-Encoding": taken})
        assert "Content-Encoding" not in found.headers
        assert (found.headers["ETag"], found.headers["Vary"]) == ('"tag"', "Accept-Encoding")
        assert found.content == LARGE * 4
    assert accepts_gzip("br;q=1.0, GZIP;q=0.8")
    assert not accepts_gzip("x-gzip, *")


def test_what_is_held_is_what_was_packed(client):
    for held in ('"tag"', 'W/"tag"'):
        again = client.get("/plans/held", headers={"If-None-Match": f'"other", {held}'})
        assert (again.status_code, again.headers["ETag"]) == (304, held)


def test_light_requests_pass_untouched(client):
    found = client.get("/v1/plans")
    assert "Vary" not in found.headers
    assert "Content-Encoding" not in found.headers


def test_a_drawing_is_asked_again_by_its_weak_tag(client, make_client, profile):
    service = make_client()
    body = {"profile": profile, "cluster": "2xcpu", "options": {"num_microbatches": 64}}
    plan_id = service.post("/v1/plans", json=body).json()["id"]
    for path in (
        f"/v1/plans/{plan_id}/view",
        f"/v1/plans/{plan_id}?format=timeline",
        "/static/plan.js",
    ):
        first = service.get(path)
        assert first.headers["Content-Encoding"] == "gzip"
        assert first.headers["ETag"].startswith('W/"')
        again = service.get(path, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
        plain = service.get(path, headers={"Accept-Encoding": "identity"})
        assert plain.content == first.content
        assert plain.headers["ETag"] == first.headers["ETag"].removeprefix("W/")
