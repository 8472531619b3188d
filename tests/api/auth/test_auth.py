"""Closed by default: every route but the open ones needs the token and a known host name."""

from __future__ import annotations

import pytest
from fastapi import APIRouter
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from stagewright.api.auth.access import OPEN_PATHS, is_open, is_page
from tests.api.app_routes import routes

HIDDEN = {
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/v1/plans/{plan_id}/view"),
    ("POST", "/v1/views"),
}
"""What the application answers and its OpenAPI document does not list."""


def filled(path):
    return path.replace("{", "").replace("}", "")


def test_the_walk_finds_what_openapi_lists(client):
    paths = client.get("/openapi.json").json()["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    found = sorted(set(routes(client.app)))
    pages = {(method, path) for method, path in found if is_page(path) or is_open(path)}
    assert set(found) == listed | HIDDEN | pages
    assert len(pages - listed) == 17


def test_every_route_but_the_open_ones_needs_a_token(make_client):
    stranger = make_client(authorized=False)
    for method, path in routes(stranger.app):
        response = stranger.request(method, filled(path))
        if is_open(path):
            assert "WWW-Authenticate" not in response.headers
        else:
            assert response.status_code == 401, (method, path)
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert response.headers["Content-Type"] == "application/problem+json"


def test_what_is_mounted_or_added_later_is_closed(make_client):
    """Also where a framework adds it: Starlette's own files, a route in a router in a router."""
    stranger = make_client(authorized=False)
    stranger.app.mount("/files", Starlette(routes=[Route("/{rest:path}", PlainTextResponse("x"))]))
    router, inner = APIRouter(), APIRouter()
    inner.get("/v1/forgotten")(lambda: "x")
    router.include_router(inner)
    stranger.app.include_router(router)
    assert {("GET", "/files/anything"), ("GET", "/v1/forgotten")} <= set(routes(stranger.app))
    for path in ("/files/anything", "/files", "/v1/forgotten"):
        assert stranger.get(path).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/", "/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect", "/v1", "/nowhere",
     "/healthz/", "//healthz", "/HEALTHZ", "/healthz/../v1/plans", "/healthz%2f..%2fv1%2fplans",
     "/v1/plans?x=/healthz"],
)  # fmt: skip
def test_every_other_path_is_closed(make_client, path):
    assert make_client(authorized=False).get(path).status_code == 401


def test_only_what_says_whether_a_server_is_well_is_open():
    assert frozenset({"/healthz", "/readyz", "/sign-in", "/sign-out"}) == OPEN_PATHS


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Bearer a-token-for-test",
     "Bearer a-token-for-testsX",
     "Basic a-token-for-tests", "a-token-for-tests", "Bearer Bearer a-token-for-tests",
     b"Bearer \xff\xfe", "Bearer " + "x" * 10_000],
)  # fmt: skip
def test_a_wrong_token_is_refused(make_client, header):
    client = make_client(authorized=False)
    response = client.get("/v1/plans", headers={"Authorization": header})
    assert response.status_code == 401


@pytest.mark.parametrize("right_one_first", [True, False])
def test_two_authorization_headers_are_refused(make_client, token, right_one_first):
    headers = [("Authorization", f"Bearer {token}"), ("Authorization", "Bearer x")]
    sent = headers if right_one_first else headers[::-1]
    assert make_client(authorized=False).get("/v1/plans", headers=sent).status_code == 401


def test_the_scheme_is_compared_without_case(make_client, token):
    client = make_client(authorized=False)
    assert client.get("/v1/plans", headers={"Authorization": f"bearer {token}"}).status_code == 200


def test_the_token_is_compared_in_constant_time(monkeypatch, client):
    seen = []
    monkeypatch.setattr(
        "stagewright.api.auth.authenticate.compare_digest", lambda *pair: seen.append(pair) or True
    )
    client.get("/v1/plans", headers={"Authorization": "Bearer anything"})
    assert seen == [(b"anything", b"a-token-for-tests")]


def test_a_strangers_body_is_not_read(make_client):
    def body():
        raise AssertionError("the body was read")
        yield b""

    response = make_client(authorized=False).post("/v1/plans", content=body())
    assert response.status_code == 401


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000"]
)
def test_loopback_names_are_answered(client, host):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "",
     "localhost@evil.example", "localhost:80:80", "[::1", "127.0.0.1:http"],
)  # fmt: skip
def test_other_names_are_refused_against_dns_rebinding(client, host):
    response = client.get("/v1/plans", headers={"Host": host})
    assert response.status_code == 400
    assert response.json()["type"].endswith(":invalid-host")


def test_a_server_meant_for_others_takes_any_name(make_client):
    client = make_client(allowed_hosts=None)
    assert client.get("/v1/plans", headers={"Host": "plans.example"}).status_code == 200


def test_websockets_are_closed(make_client):
    from starlette.websockets import WebSocketDisconnect

    client = make_client(authorized=False)
    with pytest.raises(WebSocketDisconnect) as caught, client.websocket_connect("/healthz"):
        pass
    assert caught.value.code == 1008


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200), ("http://localhost", 200), ("HTTP://LOCALHOST", 200),
        ("https://localhost", 200), ("http://localhost:8000", 403),
        ("http://evil.example", 403), ("null", 403), ("", 403),
        ("http://localhost.evil.example", 403), ("localhost", 403),
        ("file://localhost", 403), ("http://[", 403),
        ("http://localhost@evil.example", 403),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(client, origin, status):
    headers = {} if origin is None else {"Origin": origin}
    answer = client.get("/v1/plans", headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["type"].endswith(":foreign-origin")


@pytest.mark.parametrize(
    ("address", "origin", "status"),
    [
        ("http://localhost", "https://localhost", 200),  # a proxy ends TLS and does not say so
        ("https://localhost", "https://localhost", 200),
        ("https://localhost", "http://localhost", 403),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("http://127.0.0.1:8000", "https://127.0.0.1:8000", 403),
        ("http://[::1]:8000", "https://[::1]:8000", 403),
        ("http://10.0.0.1:8000", "https://10.0.0.1:8000", 403),
        ("http://127.0.0.1:8000", "ftp://127.0.0.1:8000", 403),
    ],
)
def test_a_page_of_another_scheme_is_of_another_origin(make_client, token, address, origin, status):
    client = make_client(allowed_hosts=None)
    asking = TestClient(client.app, base_url=address, headers={"Authorization": f"Bearer {token}"})
    assert asking.get("/v1/plans", headers={"Origin": origin}).status_code == status


def test_behind_a_proxy_that_ends_tls_the_origin_is_the_browsers(client, token):
    asking = TestClient(client.app, base_url="http://127.0.0.1:8000")
    asking.headers.update({"Authorization": f"Bearer {token}", "Host": "localhost:8443"})
    for origin, status in (("https://localhost:8443", 200), ("https://localhost:8000", 403)):
        assert asking.get("/v1/plans", headers={"Origin": origin}).status_code == status


def test_two_origins_are_refused(client):
    sent = [("Origin", "http://localhost"), ("Origin", "http://evil.example")]
    for headers in (sent, sent[::-1]):
        assert client.get("/v1/plans", headers=headers).status_code == 403


def test_a_database_that_does_not_answer_is_503_and_opens_nothing(make_client):
    from stagewright.api.store.database import IN_MEMORY
    from stagewright.api.store.errors import StoreUnavailable
    from stagewright.api.store.store import Store

    class Gone:
        def known(self, secret):
            return None

        def by_secret(self, secret):
            raise StoreUnavailable("gone")

    store = Store(IN_MEMORY)
    client = make_client(store=store, authorized=False)
    store.keys = Gone()
    answer = client.get("/v1/plans", headers={"Authorization": "Bearer sw_" + "a" * 43})
    assert answer.status_code == 503


def test_what_cannot_be_a_key_is_not_looked_up(make_client):
    from stagewright.api.store.database import IN_MEMORY
    from stagewright.api.store.store import Store

    store = Store(IN_MEMORY)
    client = make_client(store=store, authorized=False)
    store.keys = None
    for text in ("sw_", "sw_" + "a" * 42, "sw_" + "a" * 44, "sw_" + "ä" * 43, "x" * 46):
        header = f"Bearer {text}".encode("latin-1")
        assert client.get("/v1/plans", headers={"Authorization": header}).status_code == 401


def test_a_server_without_a_token_of_its_own_is_closed(make_client):
    client = make_client(authorized=False, token=None)
    for text in ("", "None", "null", "a-token-for-tests"):
        assert (
            client.get("/v1/plans", headers={"Authorization": f"Bearer {text}"}).status_code == 401
        )
