"""Errors reach a browser as pages and a program as problems; headers keep answers what they are."""

from __future__ import annotations

import os
import re

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile
from stagewright.api.page import templates
from stagewright.api.page.templates import model_words, short
from stagewright.api.settings.settings import LOOPBACK_NAMES, ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.jobs import MAX_ENDED_REQUEST
from stagewright.api.store.records import DEFAULT_PROJECT, JobRequest
from stagewright.core.service.documents import ProfileSummary
from stagewright.view.html import environment

TOKEN = "a-token-for-pages"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OWN = {"Origin": "http://localhost"}
PAGE = ("Content-Security-Policy", "Referrer-Policy", "Cross-Origin-Opener-Policy")


@pytest.fixture(scope="module")
def app():
    settings = ServerSettings(token=TOKEN, database=IN_MEMORY, allowed_hosts=LOOPBACK_NAMES)
    app = create_app(settings)
    app.get("/plans/broken/here")(lambda: 1 / 0)
    with TestClient(app):
        yield app


@pytest.fixture
def program(app):
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    client.headers.update(BEARER)
    return client


@pytest.fixture
def browser(app):
    client = TestClient(
        app, base_url="http://localhost", follow_redirects=False, raise_server_exceptions=False
    )
    client.post("/sign-in", data={"token": TOKEN}, headers=OWN)
    client.headers.update(HTML)
    return client


WRONG = [
    ("GET", "/nothing", 404, {}),
    ("GET", "/plans/plan_nothing", 404, {}),
    ("POST", "/plans", 405, OWN),
    ("GET", "/plans?cursor=x", 422, {}),
    ("GET", "/plans/broken/here", 500, {}),
    ("GET", "/v1/plans/plan_nothing", 404, {}),
    ("GET", "/plans", 400, {"Host": "evil.example"}),
    ("GET", "/plans", 403, {"Origin": "http://evil.example"}),
]


@pytest.mark.parametrize(("method", "path", "code", "headers"), WRONG)
def test_a_browser_gets_a_page_with_a_way_back(browser, method, path, code, headers):
    answer = browser.request(method, path, headers=headers)
    assert (answer.status_code, answer.headers["Content-Type"]) == (
        code, "text/html; charset=utf-8",
    )  # fmt: skip
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Request-ID"]
    assert 'href="/plans"' in answer.text
    assert 'class="notice bad"' in answer.text
    assert int(answer.headers["Content-Length"]) == len(answer.content)


@pytest.mark.parametrize(("method", "path", "code", "headers"), WRONG)
@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html, application/json"])
def test_a_program_gets_a_problem(program, method, path, code, headers, accept):
    answer = program.request(method, path, headers={"Accept": accept, **headers})
    assert (answer.status_code, answer.headers["Content-Type"]) == (
        code, "application/problem+json",
    )  # fmt: skip
    assert answer.json()["status"] == code
    assert answer.headers.get_list("X-Content-Type-Options") == ["nosniff"]


def test_the_page_of_a_bug_says_where_to_look_and_nothing_of_it(browser, caplog):
    answer = browser.get("/plans/broken/here")
    assert "division" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["X-Request-ID"] in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_a_stranger_is_asked_to_sign_in_wherever_they_go(app):
    stranger = TestClient(app, base_url="http://localhost", follow_redirects=False)
    for path in ("/nothing", "/plans?search=a%20b", "/v1/plans"):
        answer = stranger.get(path, headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["Location"].startswith("/sign-in?next=%2F")
        assert "WWW-Authenticate" not in answer.headers
    assert stranger.get("/nothing").status_code == 401


@pytest.mark.parametrize("path", ["/plans", "/new", "/jobs", "/profiles", "/compare", "/sign-in"])
def test_a_page_has_the_same_headers_whoever_asks(program, browser, path):
    found, shown = program.get(path), browser.get(path)
    assert found.headers["Content-Type"] == shown.headers["Content-Type"]
    for name in (*PAGE, "X-Content-Type-Options", "Cache-Control"):
        assert found.headers[name] == shown.headers[name], name


def test_every_answer_says_that_its_type_is_what_it_says(program):
    asked = ("/v1/plans", "/healthz", "/readyz", "/metrics", "/openapi.json", "/static/plan.js",
             "/static/nothing", "/v1/nothing", "/")  # fmt: skip
    for path in asked:
        answer = program.get(path, follow_redirects=False)
        assert answer.headers.get_list("X-Content-Type-Options") == ["nosniff"], path


def test_a_drawing_somebody_opens_is_nobodys_document(program):
    body = {"profile": example_profile(), "cluster": "2xcpu"}
    made = program.post("/v1/plans", json=body).json()
    for path in (
        *(f"/v1/plans/{made['id']}?format={name}" for name in ("svg", "plan")),
        f"/v1/profiles/{made['profile_id']}?format=csv",
    ):
        policy = program.get(path).headers["Content-Security-Policy"]
        assert policy == "default-src 'none'; sandbox"


def test_everything_is_read_when_the_server_starts():
    """An upgrade under a running server made pages of two releases."""
    read = (templates._environment, templates.assets)
    for one in read:
        one.cache_clear()
    with TestClient(create_app(ServerSettings(token=TOKEN, database=IN_MEMORY))):
        assert [one.cache_info().currsize for one in read] == [1, 1]
        loaded = {name for _, name in templates._environment().cache}
        assert set(templates._environment().list_templates()) <= loaded


def test_a_template_that_changes_under_a_running_server_is_not_read_again(tmp_path):
    """Cause: while a template was being edited, /sign-in of an older server was a 500."""
    template = tmp_path / "page.html"
    template.write_text("as it was")
    running = environment(tmp_path)
    assert running.get_template("page.html").render() == "as it was"
    template.write_text("{{ new }}")
    os.utime(template, (0, 0))
    assert running.get_template("page.html").render() == "as it was"


def test_a_model_is_named_by_its_family_and_sizes():
    values = {"id": "p", "created_at": "2026-01-01T00:00:00Z", "model": "x" * 99, "num_layers": 1}
    one = ProfileSummary(**values, estimated=False)
    assert model_words(one) == "x" * 39 + "…, 1 layer"
    large = one.model_copy(
        update={"family": "gpt2", "num_layers": 50, "num_parameters": 1557611200}
    )
    assert model_words(large) == "gpt2, 50 layers, 1.56 B parameters"
    assert [short(number) for number in (999, 1000, 124439808, 70 * 10**9)] == [
        "999", "1 k", "124 M", "70 B",
    ]  # fmt: skip


def rows(text):
    return re.findall(r"<tr><td>.*?</tr>", text, re.DOTALL)


def test_plans_are_found_by_model_and_devices(browser, program):
    profile = example_profile()
    profile["model"] = "Findable <i>"
    for cluster in ("3x24GB", "1x40MiB"):
        body = {"profile": profile, "cluster": cluster}
        assert program.post("/v1/plans", json=body).status_code == 201
    found = rows(browser.get("/plans?search=findable+24gb").text)
    assert len(found) == 1
    assert "Findable &lt;i&gt;, 4 layers, 4.19 M parameters" in found[0]
    assert "3 x 24GB" in found[0]
    assert "1f1b" in found[0]
    (nothing,) = rows(browser.get("/plans?search=infeasible+findable").text)
    assert "Findable" in nothing
    assert "nothing fits" in nothing
    plan_id = re.search(r'href="/plans/(plan_\w+)"', nothing)[1]
    page = browser.get(f"/plans/{plan_id}").text
    assert "Nothing fits: Findable &lt;i&gt;, 1 × 40MiB" in page
    assert "stagewright plan profile.json --devices 1x40MiB" in page
    none = browser.get("/plans?search=%22%3E%3Cb%3E%25_").text
    assert not rows(none)
    assert "<b>" not in none
    assert 'value="&#34;&gt;&lt;b&gt;%_"' in none
    assert "No matching plans" in none


def test_the_page_of_an_ended_job_says_what_it_did_without_its_request(app, browser):
    jobs = app.state.store.jobs
    text = '"' + "x" * MAX_ENDED_REQUEST + '"'
    job = jobs.submit(DEFAULT_PROJECT, JobRequest(kind="plan", request_json=text))
    jobs.request_cancel(DEFAULT_PROJECT, job.id)
    page = browser.get(f"/jobs/{job.id}")
    assert "<h1>Measure a model and plan it</h1>" in page.text
