"""Closed by default: every route but the open ones needs the token and a known host name."""

from __future__ import annotations

import pytest

from stagewright.api.auth import OPEN_PATHS

OPERATIONS = {
    ("get", "/healthz"),
    ("post", "/v1/plans"),
    ("get", "/v1/plans"),
    ("get", "/v1/plans/{plan_id}"),
    ("post", "/v1/profiles"),
    ("get", "/v1/profiles/{profile_id}"),
}


def operations(client):
    paths = client.get("/openapi.json").json()["paths"]
    return {(method, path) for path, methods in paths.items() for method in methods}


def test_the_list_of_operations_is_complete(client):
    assert operations(client) == OPERATIONS


@pytest.mark.parametrize(("method", "path"), sorted(OPERATIONS))
def test_every_operation_but_the_open_ones_needs_the_token(make_client, method, path):
    response = make_client(authorized=False).request(method, path)
    if path in OPEN_PATHS:
        assert response.status_code == 200
    else:
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize(
    "path",
    ["/", "/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect", "/v1", "/nowhere",
     "/healthz/", "//healthz", "/HEALTHZ", "/healthz/../v1/plans", "/healthz%2f..%2fv1%2fplans",
     "/v1/plans?x=/healthz"],
)  # fmt: skip
def test_every_other_path_is_closed(make_client, path):
    assert make_client(authorized=False).get(path).status_code == 401


def test_only_healthz_is_open():
    assert frozenset({"/healthz"}) == OPEN_PATHS


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
        "stagewright.api.auth.compare_digest", lambda *pair: seen.append(pair) or True
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
