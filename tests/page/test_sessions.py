"""A session's cookie opens what its token opens, to the server's own pages alone."""

from __future__ import annotations

import base64
import re

import pytest
from itsdangerous import URLSafeSerializer
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.auth import sessions as sessions_module
from stagewright.api.auth.access import Principal
from stagewright.api.auth.sessions import LIFETIME_S, MAX_ENDED, Sessions
from stagewright.api.http.examples import example_profile
from stagewright.api.middleware.load_limits import MAX_OPEN_BYTES
from stagewright.api.page.templates import assets
from stagewright.api.settings.settings import OidcSettings, ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.projects import hash_secret
from stagewright.api.store.store import Store
from stagewright.core.errors import InvalidInput

TOKEN = "a-token-for-pages"
HTML = {"Accept": "text/html"}
INLINE = r"<script(?![^>]*(src=|application/json))|style=|\son\w+="
OWN = {"Origin": "http://localhost"}


@pytest.fixture(scope="module")
def store():
    return Store(IN_MEMORY)


@pytest.fixture(scope="module")
def app(store):
    app = create_app(ServerSettings(token=TOKEN, database=IN_MEMORY), store=store)
    with TestClient(app):
        yield app


@pytest.fixture
def browser(app):
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


def sign_in(browser, token=TOKEN, **more):
    return browser.post("/sign-in", data={"token": token, **more}, headers=OWN)


def test_the_cookie_is_for_this_server_alone(browser):
    answer = sign_in(browser)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/plans")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert f"Max-Age={LIFETIME_S}" in cookie
    assert TOKEN not in cookie
    assert browser.get("/plans", headers=HTML).status_code == 200
    assert browser.get("/v1/plans").status_code == 200


@pytest.mark.parametrize("token", ["", "wrong", "wörng", "a b", TOKEN + "x"])
def test_a_wrong_token_is_told_so_and_opens_nothing(browser, token):
    answer = sign_in(browser, token)
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers
    assert 'role="alert"' in answer.text
    assert browser.get("/plans", headers=HTML).headers["Location"] == "/sign-in?next=%2Fplans"


def test_what_a_stranger_sends_is_short_or_not_read(browser):
    rest = len("token=&next=%2Fplans")
    for length, status in ((MAX_OPEN_BYTES - rest, 401), (MAX_OPEN_BYTES - rest + 1, 413)):
        assert sign_in(browser, "x" * length, next="/plans").status_code == status
    many = browser.post("/sign-in", content="a=b&" * 9, headers=OWN)
    assert many.status_code == 422
    assert "'token' and 'next'" in many.json()["detail"]
    assert browser.post("/sign-out", content="x" * 9000, headers=OWN).status_code == 413


def test_nobody_comes_from_elsewhere(browser):
    for headers in ({}, {"Origin": "http://evil"}, {"Origin": "null"}):
        foreign = browser.post("/sign-in", data={"token": TOKEN}, headers=headers)
        assert foreign.status_code == 403
        assert "Set-Cookie" not in foreign.headers
    sign_in(browser)
    body = {"plan_ids": ["plan_a", "plan_b"]}
    for headers in ({}, {"Origin": "http://evil"}, {"Origin": "null"}):
        answer = browser.post("/v1/comparisons", json=body, headers=headers)
        assert (answer.status_code, answer.json()["title"]) == (403, "Foreign origin")
    assert browser.post("/v1/comparisons", json=body, headers=OWN).status_code == 422


def test_a_bearer_token_counts_more_than_a_cookie(browser):
    sign_in(browser)
    assert browser.get("/v1/plans", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_signing_out_ends_the_session_on_the_server(browser):
    sign_in(browser)
    ((name, value),) = browser.cookies.items()
    browser.post("/sign-out", headers=OWN)
    assert not browser.cookies
    browser.cookies.set(name, value)
    assert browser.get("/v1/plans").status_code == 401


def test_the_cookie_that_ends_a_session_has_the_attributes_of_its_own(browser):
    for origin, more in (("http://localhost", set()), ("https://localhost", {"Secure"})):
        signed = browser.post("/sign-in", data={"token": TOKEN}, headers={"Origin": origin})
        ended = browser.post("/sign-out", headers={"Origin": origin})
        first, last = (one.headers["Set-Cookie"].split("; ") for one in (signed, ended))
        wanted = {"HttpOnly", "SameSite=strict", "Path=/"} | more
        for parts in (first, last):
            kept = {part for part in parts[1:] if not part.lower().startswith(("max", "exp"))}
            assert kept == wanted
        assert "Max-Age=0" in last
        assert last[0].partition("=")[0] == first[0].partition("=")[0]


def test_what_a_session_asks_is_counted_by_its_route(browser):
    sign_in(browser)
    browser.get("/v1/profiles/profile_counted")
    assert 'route="/v1/profiles/{profile_id}"' in browser.get("/metrics").text


def test_signing_in_again_ends_the_session_of_before(browser):
    sign_in(browser)
    ((name, before),) = browser.cookies.items()
    assert sign_in(browser, "wrong").status_code == 401
    assert browser.get("/v1/plans").status_code == 200
    sign_in(browser)
    assert browser.cookies[name] != before
    browser.cookies.clear()
    old = browser.get("/v1/plans", headers={"Cookie": f"{name}={before}"})
    assert old.status_code == 401


@pytest.mark.parametrize("foreign", ['x="', 'x="a; b', "a=b=c; x={1}", "x", "=;;"])
def test_cookies_of_others_sign_nobody_out(browser, foreign):
    sign_in(browser)
    ((name, value),) = browser.cookies.items()
    browser.cookies.clear()
    for cookie in (f"{foreign}; {name}={value}", f"{name}={value}; {foreign}"):
        assert browser.get("/v1/plans", headers={"Cookie": cookie}).status_code == 200


def test_a_revoked_key_opens_nothing_although_somebody_is_signed_in(browser, store):
    project = store.projects.create("revoking").id
    made = store.keys.create(project, name="n", scopes=("read",))
    sign_in(browser, made.secret)
    assert browser.get("/v1/plans").status_code == 200
    assert browser.post("/v1/views", json={"plan_id": "p"}, headers=OWN).status_code == 403
    store.keys.revoke(project, made.key.id)
    assert browser.get("/v1/plans").status_code == 401
    assert browser.get("/plans", headers=HTML).status_code == 303


@pytest.mark.parametrize(
    "wanted",
    ["//evil.example", "https://evil.example/plans", "/\\evil", "/plans\\@evil", "javascript:1",
     "/sign-out", "/v1/plans", "", "/plansx", "//[bad"],
)  # fmt: skip
def test_signing_in_leads_to_a_page_of_ours(browser, wanted):
    assert sign_in(browser, next=wanted).headers["Location"] == "/plans"
    assert sign_in(browser, next="/plans/plan_1?m=3").headers["Location"] == "/plans/plan_1?m=3"


def test_a_long_address_leads_to_its_page_without_what_is_set_there(browser):
    """Cause: who opened an address of more than 2,000 characters got an error, no form."""
    asked = browser.get("/new?devices=" + "4" * 2500, headers=HTML).headers["Location"]
    form = browser.get(asked, headers=HTML)
    assert form.status_code == 200
    assert 'value="/new"' in form.text
    assert "4444" not in form.text
    assert sign_in(browser, next="/plans/" + "x" * 2500).headers["Location"] == "/plans"


def test_pages_have_a_policy_and_are_not_kept(browser):
    sign_in(browser)
    for path, status in (
        ("/sign-in", 200),
        ("/plans", 200),
        ("/plans/plan_nothing", 404),
        ("/new", 200),
    ):
        answer = browser.get(path, headers=HTML)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (status, "no-store")
        assert "default-src 'none'; script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert not re.search(INLINE, answer.text)
    assert "there is no plan" in browser.get("/plans/plan_nothing", headers=HTML).text


def test_what_a_profile_says_is_text_and_not_markup(browser):
    sign_in(browser)
    profile = example_profile()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    profile["model"] = profile["layers"][0]["layer"]["name"] = evil
    body = {"profile": profile, "cluster": "2xcpu"}
    made = browser.post("/v1/plans", json=body, headers=OWN).json()
    for path in (f"/plans/{made['id']}", f"/profiles/{made['profile_id']}", "/plans"):
        text = browser.get(path, headers=HTML).text
        assert "<img" not in text
        assert text.count("<script") == text.count("</script>") == text.count("<script ")


def test_only_the_pages_own_files_are_served(browser):
    assert {"style.css", "plan.js", "live.js", "icon.svg"} <= assets().keys()
    for name in assets():
        answer = browser.get(f"/static/{name}")
        assert (answer.status_code, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")
        again = browser.get(f"/static/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        assert again.status_code == 304
    for name in ("../app.py", "..%2f..%2fapp.py", "plan.html", "", "nothing.js"):
        assert browser.get(f"/static/{name}").status_code in (401, 404)


KEY = "a-key-that-signs-the-sessions-of-tests"


def cookie(browser):
    ((name, value),) = browser.cookies.items()
    return {"Cookie": f"{name}={value}"}


def serving(store, **settings):
    settings = {"token": TOKEN, "database": IN_MEMORY, **settings}
    app = create_app(ServerSettings(**settings), store=store)
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


def status(client, headers):
    return client.get("/v1/plans", headers=headers).status_code


def test_servers_with_one_key_share_sessions(store):
    one, two, other = (
        serving(store, session_key=key) for key in (KEY, KEY, KEY.replace("tests", "others"))
    )
    project = store.projects.create("sharing").id
    made = store.keys.create(project, name="n", scopes=("read",))
    for token in (TOKEN, made.secret):
        sign_in(one, token)
        sent = cookie(one)
        assert [status(client, sent) for client in (one, two, other)] == [200, 200, 401]
    store.keys.revoke(project, made.key.id)
    assert [status(client, sent) for client in (one, two)] == [401, 401]


def test_without_a_key_every_server_has_its_own(store, browser):
    sign_in(browser)
    assert status(serving(store), cookie(browser)) == 401


def test_a_session_of_the_servers_token_ends_when_that_changes(store):
    before = serving(store, session_key=KEY)
    sign_in(before)
    sent = cookie(before)
    assert status(serving(store, session_key=KEY), sent) == 200
    assert status(serving(store, session_key=KEY, token="another-token"), sent) == 401
    assert status(serving(store, session_key=KEY, token=None), sent) == 401


def test_a_tampered_cookie_is_refused(browser):
    sign_in(browser)
    ((name, value),) = browser.cookies.items()
    browser.cookies.clear()
    payload, _, signature = value.rpartition(".")
    swapped = "A" if payload[5] != "A" else "B"
    for wrong in (
        f"{payload[:5]}{swapped}{payload[6:]}.{signature}",
        f"{payload}.{signature[::-1]}",
        payload,
        f".{signature}",
        "",
    ):
        assert status(browser, {"Cookie": f"{name}={wrong}"}) == 401
    assert status(browser, {"Cookie": f"{name}={value}"}) == 200


def test_the_cookie_holds_no_secret(browser, store):
    made = store.keys.create(store.projects.create("open").id, name="n", scopes=("read",))
    for token in (TOKEN, made.secret):
        sign_in(browser, token)
        ((_, value),) = browser.cookies.items()
        text = str(URLSafeSerializer("any").load_payload(value.rpartition(".")[0].encode()))
        assert "ends_at_s" in text
        assert not any(secret in text for secret in (token, hash_secret(token)))


def test_a_short_key_is_refused():
    with pytest.raises(InvalidInput, match="at least 32"):
        Sessions("short")


def read(sessions, value):
    return sessions.read(Headers({"cookie": f"stagewright_0={value}"}))


def test_sessions_end_by_time_and_when_closed():
    now = [0.0]
    sessions = Sessions(now=lambda: now[0])
    key = Principal(id="key_1")
    first, second = sessions.open(key, "sw_"), sessions.open(key, "sw_")
    assert first != second
    sessions.close(read(sessions, second))
    now[0] = LIFETIME_S - 1
    assert read(sessions, first).key_id == "key_1"
    assert read(sessions, second) is None
    now[0] = LIFETIME_S
    assert read(sessions, first) is None
    sessions.close(None)


def test_one_holder_who_signs_in_and_out_for_ever_ends_no_session_of_another():
    """Sessions ended early were kept one by one: a key could make a server remember any number."""
    now = [0.0]
    sessions = Sessions(now=lambda: now[0])
    busy, other = Principal(id="key_1"), Principal(id="key_2")
    kept, closed = sessions.open(other, "sw_"), sessions.open(other, "sw_")
    sessions.close(read(sessions, closed))
    values = []
    for _ in range(1005):
        now[0] += 1.0
        values.append(sessions.open(busy, "sw_"))
        sessions.close(read(sessions, values[-1]))
    assert all(read(sessions, value) is None for value in values)
    assert read(sessions, kept) is not None
    assert read(sessions, closed) is None
    now[0] += 1.0
    assert read(sessions, sessions.open(busy, "sw_")) is not None
    assert sum(map(len, sessions._ended._ended.values())) <= 2 * MAX_ENDED


def test_the_holders_remembered_are_bounded_and_nothing_ended_is_valid_again(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_HOLDERS", 3)
    now = [0.0]
    sessions = Sessions(now=lambda: now[0])
    values = []
    for number in range(10):
        now[0] += 1.0
        values.append(sessions.open(Principal(id=f"key_{number}"), "sw_"))
        sessions.close(read(sessions, values[-1]))
    assert all(read(sessions, value) is None for value in values)
    assert len(sessions._ended._ended) == 3
    now[0] += 1.0
    assert read(sessions, sessions.open(Principal(id="key_0"), "sw_")) is not None


def test_a_project_that_makes_ever_more_keys_ends_no_session_of_another(monkeypatch):
    """Holders beyond the bound raised a floor for everybody: who manages keys could end all."""
    monkeypatch.setattr(sessions_module, "MAX_HOLDERS", 5)
    now = [0.0]
    sessions = Sessions(now=lambda: now[0])
    others = [
        Principal(id="key_other", project_id="project_2"),
        Principal(id="oidc:ada", project_id="project_2", scopes=frozenset({"read"})),
        Principal(id=None),
    ]
    monkeypatch.setattr(sessions_module, "_expiry_of", lambda token: LIFETIME_S)
    kept, closed = ([sessions.open(who, "a token") for who in others] for _ in range(2))
    for value in closed:
        sessions.close(read(sessions, value))
    values = []
    for number in range(20):
        now[0] += 1.0
        busy = Principal(id=f"key_{number}", project_id="project_1")
        values.append(sessions.open(busy, "sw_"))
        sessions.close(read(sessions, values[-1]))
    assert all(read(sessions, value) is not None for value in kept)
    assert all(read(sessions, value) is None for value in (*values, *closed))
    assert len(sessions._ended._ended) == 5


def test_a_session_of_a_providers_token_ends_with_it():
    now = [0.0]
    sessions = Sessions(now=lambda: now[0])
    claims = base64.urlsafe_b64encode(b'{"exp": 60}').decode().rstrip("=")
    holder = Principal(id="oidc:ada", project_id="project_1", scopes=frozenset({"read"}))
    value = sessions.open(holder, f"header.{claims}.signature")
    assert read(sessions, value).principal == holder
    now[0] = 60.0
    assert read(sessions, value) is None


def test_a_session_does_not_outlive_the_providers_settings():
    provider = {"issuer": "https://id.example", "audience": "a", "jwks_url": "https://id.example/k"}
    before, after = (
        Sessions(KEY, OidcSettings(**provider, scopes_claim=claim)) for claim in ("scope", "roles")
    )
    value = before.open(Principal(id="key_1"), "sw_")
    assert read(before, value) is not None
    assert read(after, value) is None
