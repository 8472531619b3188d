"""Jobs over HTTP: handed in, watched, waited for, cancelled, found again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from stagewright.api.examples import measure_example
from stagewright.core.profile import Profile
from tests.api.job_children import measuring, sleeping

JOB = {name: value for name, value in measure_example().items() if name != "cluster"}


@pytest.fixture
def serving(make_client, child, profile) -> Callable[..., Any]:
    """Clients of services whose children are stand-ins."""

    def serving(program: str | None = None, **settings: Any):
        return make_client(measure_command=child(program or measuring(profile)), **settings)

    return serving


def ended(client, job: dict[str, Any], timeout_s: float = 20.0) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    while job["state"] in ("queued", "running"):
        assert time.monotonic() < end, job
        time.sleep(0.02)
        job = client.get(f"/v1/jobs/{job['id']}").json()
    return job


def events(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_a_measurement_is_a_job_with_a_profile_in_the_end(serving, profile):
    client = serving()
    answer = client.post("/v1/profile-jobs", json=JOB)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["kind"], job["state"], job["needs"]) == ("profile", "queued", {"cpu": 1})
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    done = ended(client, job)
    assert (done["state"], done["attempt"], done["problem"]) == ("succeeded", 1, None)
    assert done["progress"]["step"] == "measuring"
    found = client.get(done["result"]["href"]).json()
    assert Profile.model_validate(found["profile"]) == Profile.model_validate(profile)
    assert client.get("/v1/jobs").json()["jobs"] == [done]
    assert client.get("/v1/jobs?state=queued").json()["jobs"] == []
    assert client.get("/v1/jobs/job_none").status_code == 404
