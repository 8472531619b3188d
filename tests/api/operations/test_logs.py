"""The log: one line a request with its ids, one way of writing, and no secret in any of it."""

from __future__ import annotations

import io
import json
import logging
import warnings

import pytest

from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.api.store.store import Store
from stagewright.api.telemetry.logs import configure_logging
from stagewright.api.telemetry.redaction import Scrubber
from stagewright.api.telemetry.tracing import accepted_request_id, bind

TOKEN_OF_SERVER = "a-token-for-tests"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def logged(own_logging):
    """What is logged from here on, as JSON lines."""
    stream = io.StringIO()
    configure_logging("json", "debug", secrets=[TOKEN_OF_SERVER, "p@ssw0rd"], stream=stream)

    def lines():
        found = [json.loads(line) for line in stream.getvalue().splitlines()]
        return [line for line in found if line["logger"].partition(".")[0] == "stagewright"]

    lines.text = stream.getvalue
    return lines


def requests_of(lines):
    return [line for line in lines() if line["logger"] == "stagewright.access"]


def test_a_request_is_one_line_with_route_and_ids(client, logged):
    answer = client.get("/v1/plans/plan_1?page=2")
    (line,) = requests_of(logged)
    assert line["request_id"] == answer.headers["X-Request-ID"] == answer.json()["request_id"]
    told = {name: line[name] for name in ("event", "level", "method", "route", "path", "status")}
    assert told == {
        "event": "request", "level": "info", "method": "GET", "route": "/v1/plans/{plan_id}",
        "path": "/v1/plans/plan_1", "status": 422,
    }  # fmt: skip
    assert line["project_id"] == DEFAULT_PROJECT
    assert line["response_bytes"] == len(answer.content)
    assert line["duration_s"] > 0
    assert line["timestamp"].endswith("Z")


def test_the_key_is_named_and_its_secret_is_not(make_client, logged):
    store = Store(IN_MEMORY)
    made = store.keys.create(DEFAULT_PROJECT, name="n", scopes=["read"])
    client = make_client(store=store, authorized=False)
    client.get("/v1/plans", headers={"Authorization": f"Bearer {made.secret}"})
    client.get("/v1/plans", headers={"Authorization": f"Bearer {made.secret[:-1]}x"})
    first, second = requests_of(logged)
    assert (first["key_id"], first["status"]) == (made.key.id, 200)
    assert "key_id" not in second, "what one request bound is not the next one's"
    assert second["status"] == 401
    assert made.secret not in logged.text()


def test_a_callers_id_is_taken_if_it_is_one_word(client, logged):
    assert client.get("/healthz", headers={"X-Request-ID": "build-7/a"}).headers[
        "X-Request-ID"
    ] == "build-7/a"  # fmt: skip
    for wrong in ("", "two words", "x" * 129, 'quo"te', "-dash", "ümlaut".encode("latin-1")):
        given = client.get("/healthz", headers={"X-Request-ID": wrong}).headers["X-Request-ID"]
        assert given.startswith("req_")
        assert len(given) == 28
    assert accepted_request_id(None) != accepted_request_id(None)
    assert "quo" not in logged.text()


def test_probes_are_quiet_while_all_is_well(make_client, logged):
    class Gone(Store):
        def check(self):
            raise OSError("no such host")

    make_client().get("/healthz")
    make_client(store=Gone(IN_MEMORY)).get("/readyz")
    well, unwell = requests_of(logged)
    assert (well["level"], unwell["level"]) == ("debug", "info")


def test_lines_of_a_request_and_of_a_job_carry_its_id(client, logged, monkeypatch):
    def fails(*arguments, **options):
        logging.getLogger("stagewright.somewhere").warning("in a thread")
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(client.app.state.metrics), "text", fails)
    answer = client.get("/metrics")
    assert (answer.status_code, answer.json()["type"]) == (
        500, "urn:problem-type:stagewright:internal-error"
    )  # fmt: skip
    ours = [line for line in logged() if "request_id" in line]
    assert {line["request_id"] for line in ours} == {answer.headers["X-Request-ID"]}
    events = [line["event"] for line in ours]
    assert events == ["in a thread", "this request could not be answered", "request"]
    assert 'raise RuntimeError("a bug")' in ours[1]["exception"]

    with bind(job_id="job_1"):
        logging.getLogger("stagewright.jobs").info("measuring", extra={"attempt": 2})
    logging.getLogger("stagewright.jobs").info("outside")
    inside, outside = logged()[-2:]
    assert (inside["job_id"], inside["attempt"]) == ("job_1", 2)
    assert not {"job_id", "request_id"} & set(outside)


def test_the_audit_log_and_the_log_have_the_same_id(make_client, profile):
    store = Store(IN_MEMORY)
    client = make_client(store=store)
    made = client.post("/v1/profiles", json=profile)
    make_client(store=store, authorized=False).get(
        "/v1/plans", headers={"X-Request-ID": "stranger"}
    )
    ids = [entry.request_id for entry in store.audit.entries(limit=9).items]
    assert ids == ["stranger", made.headers["X-Request-ID"]]


KEY = "sw_" + "k" * 43
JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJtZSJ9.c2lnbmF0dXJl"


@pytest.mark.parametrize("secret", [KEY, JWT, TOKEN_OF_SERVER, "p@ssw0rd", "Bearer abc.def-ghi"])
def test_a_secret_is_masked_wherever_it_turns_up(logged, secret):
    log = logging.getLogger("stagewright.tests")
    log.info("with %s inside", secret, extra={"nested": {"list": [f"x{secret}", {"deep": secret}]}})
    try:
        raise ValueError(f"cannot open postgresql://me:{secret}@db/plans")
    except ValueError:
        log.exception("failed with an error")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"about {secret}", stacklevel=1)
    assert secret.removeprefix("Bearer ") not in logged.text()
    assert logged.text().count("********") >= 4


def test_no_request_gets_a_secret_into_the_log(make_client, logged):
    """Wherever a client puts it: in the path, the query, headers, the body."""
    client = make_client(authorized=False)
    for headers in ({}, {"Authorization": f"Bearer {TOKEN_OF_SERVER}"}):
        for secret in (KEY, JWT, TOKEN_OF_SERVER):
            headers = {**headers, "X-Request-ID": secret, "Origin": f"http://{secret}"}
            client.get(f"/v1/plans/{secret}?token={secret}", headers=headers)
            headers.pop("Origin")
            client.post(f"/{secret}", json={secret: secret}, headers=headers)
            client.get("/v1/plans", headers={"Authorization": f"Basic {secret}"})
    assert len(requests_of(logged)) == 18
    for secret in (KEY, JWT, TOKEN_OF_SERVER):
        assert secret not in logged.text()


def test_a_path_cannot_write_lines_of_its_own(client, logged):
    client.get("/v1/plans/%0A{}%1b[2J")
    assert requests_of(logged)[-1]["path"] == "/v1/plans/%0A%7B%7D%1b[2J"


def test_on_a_terminal_it_is_words(logged, make_client):
    stream = Terminal()
    configure_logging("auto", "info", stream=stream)
    with bind(request_id="req_1"):
        logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[1mX"})
    (line,) = stream.getvalue().splitlines()
    assert "Started" in line
    assert "req_1" in line
    assert "color_message" not in line


def test_the_least_that_is_logged_can_be_said(logged):
    stream = io.StringIO()
    configure_logging("json", "warning", stream=stream)
    logging.getLogger("stagewright.x").info("no")
    logging.getLogger("stagewright.x").warning("yes")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]


def test_short_words_are_no_secrets():
    """A password of three letters would mask half of every line."""
    assert Scrubber(["the"])(None, "info", {"event": "the end"}) == {"event": "the end"}
