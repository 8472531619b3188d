"""A session's cookie opens what its token opens, to the server's own pages alone."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile
from stagewright.api.middleware.body_limit import MAX_OPEN_BYTES
from stagewright.api.page.sessions import LIFETIME_S, MAX_SESSIONS, Sessions
from stagewright.api.page.templates import assets
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.store import Store

TOKEN = "a-token-for-pages"
HTML = {"Accept": "text/html"}
INLINE = r"<script(?![^>]*(src=|application/json))|style=|\son\w+="
OWN = {"Origin": "http://localhost"}


@pytest.fixture(scope="module")
def store():
    return Store(IN_MEMORY)


@pytest.fixture(scope="module")
def app(store):
    app = create_app(ServerSettings(token=TOKEN, database=IN_MEMORY, plan_processes=0), store=store)
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


def test_sessions_end_by_time_and_by_number():
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first = sessions.open("one")
    now[0] = LIFETIME_S - 1
    assert sessions.token(first) == "one"
    now[0] = LIFETIME_S
    assert sessions.token(first) is None
    values = [sessions.open(str(number)) for number in range(MAX_SESSIONS + 1)]
    assert sessions.token(values[0]) is None
    assert sessions.token(values[1]) == "1"
    assert len(set(values)) == len(values)
