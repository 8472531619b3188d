"""What is told about jobs: lines of the log with their ids, numbers, spans."""

from __future__ import annotations

import logging
import time

import pytest
from structlog.contextvars import get_contextvars

from stagewright.api.http.examples import measure_example
from tests.api.job_children import failing, measuring
from tests.api.operations.test_metrics import samples
from tests.api.operations.test_traces import spans  # noqa: F401 - a fixture

JOB = {name: value for name, value in measure_example().items() if name != "cluster"}


class Bound(logging.Handler):
    """Lines as they are logged, with what is bound then."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append({"event": record.getMessage(), **vars(record), **context_values()})


def context_values():
    return dict(get_contextvars())


@pytest.fixture
def lines(caplog):
    """Lines logged about jobs.

    Until `set_level` was used, `log.level` was assigned: loggers cache what `isEnabledFor`
    returns, and only `setLevel` clears that, so the lines were missing after certain tests.
    """
    handler = Bound()
    log = logging.getLogger("stagewright.api.jobs")
    log.addHandler(handler)
    caplog.set_level(logging.INFO, log.name)
    yield handler.lines
    log.removeHandler(handler)


def run(client):
    """A job handed in and seen to its end, and the id of the request that did."""
    answer = client.post("/v1/profile-jobs", json=JOB)
    assert answer.status_code == 202, answer.text
    job, end = answer.json(), time.monotonic() + 30
    while job["state"] in ("queued", "running"):
        assert time.monotonic() < end
        time.sleep(0.02)
        job = client.get(f"/v1/jobs/{job['id']}").json()
    return job, answer.headers["X-Request-ID"]


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_job_is_told_of(make_client, child, profile, lines, spans, state):  # noqa: F811
    program = measuring(profile) if state == "succeeded" else failing("MeasurementError", "no")
    client = make_client(measure_command=child(program))
    job, request_id = run(client)
    assert job["state"] == state

    end = time.monotonic() + 10
    while "stagewright.job" not in spans():  # the row is written before the last word is said
        assert time.monotonic() < end
        time.sleep(0.02)
    started, ended = (line for line in lines if line["event"].startswith("job "))
    assert (started["event"], ended["event"]) == ("job started", "job ended")
    assert started["job_id"] == ended["job_id"] == job["id"]
    assert started["project_id"] == "project_default"
    assert started["request_id"] == request_id, "whoever handed it in is found"
    assert ended["state"] == state
    assert ended["duration_s"] > 0

    found = samples(client.get("/metrics").text)
    kind = ("kind", "profile")
    assert found["stagewright_job_queued_seconds_count", kind] == 1
    assert found["stagewright_job_duration_seconds_count", kind, ("state", state)] == 1
    assert found["stagewright_jobs", kind, ("state", state)] == 1

    whole, measure = spans()["stagewright.job"], spans()["stagewright.measure"]
    assert whole.attributes["stagewright.job_id"] == job["id"]
    assert measure.parent.span_id == whole.context.span_id
    assert whole.context.trace_id == spans()["POST /v1/profile-jobs"].context.trace_id
