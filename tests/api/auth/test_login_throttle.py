"""Wrong tokens are slowed down by address; keys, sessions and other addresses are not."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.auth import authenticate as guessing
from stagewright.api.auth.access import OPERATOR
from stagewright.api.auth.authenticate import (
    SECONDS_EACH,
    WRONG_AT_ONCE,
    Authenticator,
    LoginThrottle,
)
from stagewright.api.auth.middleware import AuditWriter, AuthMiddleware
from stagewright.api.errors import Forbidden, IdentityProviderUnreachable, Unauthorized
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.api.store.store import Store

TOKEN = "a-token-for-tests"
OWN = {"Origin": "http://localhost"}


@pytest.fixture
def clock():
    class Clock:
        time_s = 1000.0

        def __call__(self):
            return self.time_s

    return Clock()


@pytest.fixture
def store():
    opened = Store(IN_MEMORY)
    yield opened
    opened.close()


AWAY = {"signed.but.away": 503, "signed.for.nothing": 403}
ERRORS = {
    "signed.but.away": IdentityProviderUnreachable(30),
    "signed.for.nothing": Forbidden("another project"),
}


class Provider:
    """Signs one token, and two that open nothing for other reasons."""

    def principal(self, token):
        if token in ERRORS:
            raise ERRORS[token]
        if token != "signed.by.provider":
            raise Unauthorized("not signed", is_invalid_token=True)
        return OPERATOR


@pytest.fixture
def at(clock, store):
    """Clients of one gate, each at an address."""
    who = Authenticator(TOKEN, store, Provider(), LoginThrottle(clock))
    auth = AuthMiddleware(PlainTextResponse("in"), who, AuditWriter(store, clock), clock)
    return lambda address: TestClient(auth, base_url="http://localhost", client=(address, 1))


def status(client, token=TOKEN):
    return client.get("/v1/plans", headers={"Authorization": f"Bearer {token}"}).status_code


def guess(client, times=WRONG_AT_ONCE):
    return [status(client, f"wrong-{number}") for number in range(times)]


def test_ten_at_once_and_then_one_every_six_seconds(at, clock):
    client = at("10.0.0.1")
    assert guess(client, WRONG_AT_ONCE + 2) == [401] * WRONG_AT_ONCE + [429] * 2
    refused = client.get("/v1/plans", headers={"Authorization": "Bearer wrong"})
    assert refused.headers["Retry-After"] == f"{SECONDS_EACH:.0f}"
    assert refused.json()["type"].endswith(":too-many-wrong-tokens")
    clock.time_s += SECONDS_EACH - 0.01
    assert guess(client, 1) == [429]
    clock.time_s += 0.01
    assert guess(client, 2) == [401, 429]
    clock.time_s += 3600
    assert guess(client, WRONG_AT_ONCE + 1) == [401] * WRONG_AT_ONCE + [429]


def test_a_guess_that_is_right_is_not_told_while_it_has_to_wait(at, clock):
    client = at("10.0.0.1")
    guess(client)
    assert status(client) == 429
    clock.time_s += SECONDS_EACH
    assert status(client) == 200


def test_right_tokens_elsewhere_open_all_the_time(at):
    guess(at("10.0.0.1"), WRONG_AT_ONCE + 5)
    assert status(at("10.0.0.2")) == 200


def test_keys_open_at_an_address_that_guesses_and_wrong_ones_count(at, store):
    client = at("10.0.0.1")
    secret = store.keys.create(DEFAULT_PROJECT, name="n", scopes=("read",)).secret
    wrong = secret[:-4] + ("AAAA" if secret[-4:] != "AAAA" else "BBBB")
    found = [status(client, wrong) for _ in range(WRONG_AT_ONCE + 1)]
    assert found == [401] * WRONG_AT_ONCE + [429]
    assert status(client, secret) == 200
    assert status(client) == 429


def test_what_looks_like_a_providers_token_counts_too_and_right_ones_open(at):
    client = at("10.0.0.1")
    found = [status(client, f"wrong.{number}.x") for number in range(WRONG_AT_ONCE + 1)]
    assert set(found) == {401}
    assert status(client) == 429
    assert status(client, "signed.by.provider") == 200


@pytest.mark.parametrize("token", AWAY)
def test_a_provider_that_does_not_answer_makes_nobody_a_guesser(at, token):
    client = at("10.0.0.1")
    found = [status(client, token) for _ in range(2 * WRONG_AT_ONCE)]
    assert set(found) == {AWAY[token]}
    assert status(client) == 200


def test_a_servers_token_of_that_form_is_not_guessed_while_the_provider_is_away(clock, store):
    who = Authenticator("three.short.words", store, Provider(), LoginThrottle(clock))
    client = TestClient(
        AuthMiddleware(PlainTextResponse("in"), who, AuditWriter(store, clock), clock)
    )
    found = [status(client, "signed.but.away") for _ in range(WRONG_AT_ONCE)]
    assert (set(found), status(client, "three.short.words")) == ({503}, 401)


def test_no_token_is_no_guess(at):
    client = at("10.0.0.1")
    assert {client.get("/v1/plans").status_code for _ in range(2 * WRONG_AT_ONCE)} == {401}
    assert status(client) == 200


def test_whoever_has_an_ipv6_address_has_its_network(at):
    for number in range(WRONG_AT_ONCE):
        guess(at(f"2001:db8::{number}"), 1)
    assert status(at("2001:db8::ffff:1:2:3")) == 429
    assert status(at("2001:db8:0:1::1")) == 200


def test_what_it_remembers_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(guessing, "MAX_ADDRESSES", 50)
    login_throttle = LoginThrottle(clock)

    def scope(number):
        return {"client": (f"10.0.{number // 256}.{number % 256}", 1)}

    for number in range(200):
        for _ in range(WRONG_AT_ONCE):
            login_throttle.record_failure(scope(number))
    assert len(login_throttle._empty_at) == 50
    assert login_throttle.wait_s(scope(199)) == SECONDS_EACH
    assert login_throttle.wait_s(scope(0)) == 0


@pytest.fixture
def browsers(store):
    app = create_app(ServerSettings(token=TOKEN, database=IN_MEMORY), store=store)

    def browser(address):
        where = {"base_url": "http://localhost", "client": (address, 1)}
        return TestClient(app, follow_redirects=False, **where)

    return browser


def sign_in(browser, token):
    return browser.post("/sign-in", data={"token": token}, headers=OWN)


def test_signing_in_is_guessing_too_but_who_is_signed_in_stays(browsers, store):
    inside, outside = browsers("10.0.0.1"), browsers("10.0.0.1")
    assert sign_in(inside, TOKEN).status_code == 303
    found = [sign_in(outside, f"wrong-{number}") for number in range(WRONG_AT_ONCE + 1)]
    assert [one.status_code for one in found] == [401] * WRONG_AT_ONCE + [429]
    assert int(found[-1].headers["Retry-After"]) in (5, 6)
    assert "wrong tokens from this address" in found[-1].text
    assert "<form" in found[-1].text
    assert (sign_in(outside, TOKEN).status_code, status(outside)) == (429, 429)
    assert inside.get("/v1/plans").status_code == 200
    assert sign_in(browsers("10.0.0.2"), TOKEN).status_code == 303
    key = store.keys.create(DEFAULT_PROJECT, name="n", scopes=("read",)).secret
    assert sign_in(outside, key).status_code == 303


def test_signing_in_is_in_the_audit_log_and_so_is_what_was_refused(browsers, store):
    browser = browsers("10.0.0.9")
    key = store.keys.create(DEFAULT_PROJECT, name="n", scopes=("read",))
    for token in ("wrong-1", key.secret):
        sign_in(browser, token)
    last, first = store.audit.entries(limit=2).items
    assert {last.action, first.action} == {"POST /sign-in"}
    assert (first.outcome, first.key_id, first.address) == ("unauthorized", None, "10.0.0.9")
    assert (last.outcome, last.key_id, last.project_id) == ("ok", key.key.id, DEFAULT_PROJECT)
    assert first.request_id


def test_whoever_is_signed_in_with_a_key_does_not_guess_the_servers_token(browsers, store):
    browser = browsers("10.0.0.1")
    sign_in(browser, store.keys.create(DEFAULT_PROJECT, name="n", scopes=("read",)).secret)
    found = [sign_in(browser, f"wrong-{number}").status_code for number in range(WRONG_AT_ONCE)]
    assert found == [401] * WRONG_AT_ONCE
    assert sign_in(browser, TOKEN).status_code == 429
