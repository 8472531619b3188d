"""Jobs over HTTP: handed in, watched, waited for, cancelled, found again."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from stagewright.api.auth.access import Principal
from stagewright.api.http.examples import measure_example
from stagewright.api.http.problems import Problem
from stagewright.api.jobs import service as service_module
from stagewright.api.routes.jobs import watch_job
from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.core.profile.profile import Profile
from tests.api.job_children import failing, measuring, sleeping

JOB = {name: value for name, value in measure_example().items() if name != "cluster"}


@pytest.fixture
def serving(make_client, child, profile) -> Callable[..., Any]:
    """Clients of services whose children are stand-ins."""

    def serving(program: str | None = None, **settings: Any):
        command = child(program or measuring(profile))
        return make_client(measure_command=command, sandbox="off", **settings)

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
    blocks = (block for block in text.strip().split("\n\n") if not block.startswith(":"))
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def hand_in(client, path: str = "/v1/profile-jobs", body: Any = None, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, json=JOB if body is None else body, headers=named)


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


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


def test_its_events_are_numbered_and_a_stream_goes_on_where_one_broke(serving):
    client = serving()
    job = ended(client, hand_in(client).json())
    answer = client.get(f"/v1/jobs/{job['id']}/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    told = events(answer.text)
    assert [number for number, _, _ in told] == list(range(1, len(told) + 1))
    kinds = [kind for _, kind, _ in told]
    assert kinds[:2] == ["queued", "started"]
    assert set(kinds[2:-1]) == {"progress"}
    assert kinds[-1] == "succeeded"
    assert told[-1][2]["job"] == job
    assert told[2][2].keys() == {"step", "done", "total", "layer", "at", "attempt"}
    path = f"/v1/jobs/{job['id']}/events"
    later = client.get(path, headers={"Last-Event-ID": "2"})
    assert events(later.text) == told[2:]
    assert events(client.get(path, params={"after": len(told) - 1}).text) == told[-1:]
    assert client.get(path, params={"after": len(told)}).text == ""
    assert client.get("/v1/jobs/job_none/events").status_code == 404


def test_one_key_watches_so_many_jobs_and_all_keys_together_so_many(serving, monkeypatch):
    """Every stream reads the store every other second, and nothing bounded their number."""
    monkeypatch.setattr(service_module, "MAX_KEY_STREAMS", 2)
    monkeypatch.setattr(service_module, "MAX_STREAMS", 6)
    client = serving()
    job = ended(client, hand_in(client).json())
    path, streams = f"/v1/jobs/{job['id']}/events", client.app.state.jobs.streams
    assert client.get(path).status_code == 200
    project, owner = DEFAULT_PROJECT, "the server's token"
    with (
        streams.share(owner, project) as own,
        streams.share("key_1", project) as others,
        streams.share("key_2", "another") as strangers,
    ):
        own.add(2)
        refused = client.get(path)
        assert refused.status_code == 429
        assert refused.headers["Retry-After"]
        assert "may watch 2 jobs at once" in refused.json()["detail"]
        own.add(-1)
        assert client.get(path).status_code == 200, "what has ended makes room"
        others.add(2)
        assert client.get(path).status_code == 429, "a project has at most half of all"
        others.add(-2)
        assert client.get(path).status_code == 200
        strangers.add(5)
        assert client.get(path).status_code == 429
    assert client.get(path).status_code == 200


def test_a_stream_counts_before_it_begins_and_no_longer_if_it_never_does(serving, monkeypatch):
    """Of many requests at once each found room, until the first stream had begun."""
    monkeypatch.setattr(service_module, "MAX_KEY_STREAMS", 1)
    client = serving()
    job, services = ended(client, hand_in(client).json()), client.app.state
    principal = Principal()
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": []})

    async def leave(*_):
        raise OSError("the client has left")

    async def main():
        async def watch():
            return await watch_job(
                services.jobs, services.store, services.authenticator, job["id"], request, principal
            )

        first = await watch()
        with pytest.raises(Problem, match="may watch 1 jobs"):
            await watch()
        with pytest.raises((OSError, ClientDisconnect, ExceptionGroup)):
            await first({**request.scope, "asgi": {"spec_version": "2.4"}}, leave, leave)
        assert services.jobs.streams.has_room(principal.owner, principal.project_id)
        await watch()

    client.portal.call(main)


def test_a_request_waits_as_long_as_it_says(serving, profile):
    client = serving(measuring(profile, seconds=1.0))
    body = measure_example()
    early = hand_in(client, "/v1/plans", body, Prefer="wait=0")
    assert early.status_code == 202
    assert early.headers["Preference-Applied"] == "wait=0"
    assert early.headers["Location"] == f"/v1/jobs/{early.json()['id']}"
    joined = hand_in(client, "/v1/plans", body, Prefer="wait=20, handling=strict")
    assert joined.status_code == 201
    assert joined.headers["Preference-Applied"] == "wait=20"
    job = client.get(early.headers["Location"]).json()
    assert job["result"]["href"] == joined.headers["Location"]
    assert len(client.get("/v1/jobs").json()["jobs"]) == 1, "equal requests are one job"
    again = hand_in(client, "/v1/plans", body, Prefer="wait=0")
    assert (again.status_code, again.headers["Stagewright-Reused"]) == (201, "plan")


def test_the_same_is_not_measured_twice_unless_asked_for(serving, profile, tmp_path):
    runs = tmp_path / "runs"
    client = serving(f"open({str(runs)!r}, 'a').write('x')\n" + measuring(profile))
    first = ended(client, hand_in(client).json())
    known = hand_in(client)
    assert (known.status_code, known.json()["state"]) == (200, "succeeded")
    assert known.headers["Stagewright-Reused"] == "profile"
    assert known.json()["result"] == first["result"]
    plan = hand_in(client, "/v1/plans", measure_example())
    assert (plan.status_code, plan.headers["Stagewright-Reused"]) == (201, "profile")
    assert runs.read_text() == "x"
    fresh = hand_in(client, Cache_Control="no-cache")
    assert fresh.status_code == 202
    assert ended(client, fresh.json())["state"] == "succeeded"
    assert runs.read_text() == "xx"
    other = {**JOB, "profiling": {"device": "cpu", "num_threads": 1}}
    assert hand_in(client, body=other).status_code == 202


def test_two_plans_from_one_measurement_measure_once(serving, profile, tmp_path):
    runs = tmp_path / "runs"
    client = serving(f"open({str(runs)!r}, 'a').write('x')\n" + measuring(profile, seconds=0.3))
    jobs = [
        hand_in(client, "/v1/plans", {**measure_example(), "cluster": devices}, Prefer="wait=0")
        for devices in ("1xcpu", "2xcpu", "3xcpu")
    ]
    assert {ended(client, job.json())["state"] for job in jobs} == {"succeeded"}
    assert runs.read_text() == "x"
    assert len(client.get("/v1/plans").json()["plans"]) == 3


def test_an_idempotency_key_has_one_job(serving):
    client = serving()
    first = hand_in(client, Idempotency_Key="k", Cache_Control="no-cache")
    second = hand_in(client, Idempotency_Key="k", Cache_Control="no-cache")
    assert first.json()["id"] == second.json()["id"]
    assert second.headers["Idempotency-Replayed"] == "true"


def test_a_running_job_is_cancelled_and_its_process_is_dead(serving, tmp_path):
    client = serving(sleeping(str(tmp_path / "pid")))
    running = hand_in(client).json()
    waiting = hand_in(client, body={**JOB, "profiling": {"num_threads": 1}}).json()
    wait_for(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    pid = int((tmp_path / "pid").read_text())
    assert client.post(f"/v1/jobs/{waiting['id']}/cancel").json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{running['id']}/cancel").json()["state"] == "running"
    done = ended(client, running)
    assert (done["state"], done["result"], done["problem"]) == ("cancelled", None, None)
    wait_for(lambda: not is_alive(pid))
    again = client.post(f"/v1/jobs/{running['id']}/cancel")
    assert (again.status_code, again.json()) == (200, done)
    kinds = [kind for _, kind, _ in events(client.get(f"/v1/jobs/{running['id']}/events").text)]
    assert kinds[-2:] == ["cancel-requested", "cancelled"]


def test_out_of_memory_is_a_result_that_names_the_layer(serving):
    client = serving(
        failing("OutOfMemory", "out of memory in blocks.7", layer="blocks.7",
                required_bytes=3_000, available_bytes=2_000)
    )  # fmt: skip
    problem = ended(client, hand_in(client).json())["problem"]
    assert problem["type"].endswith(":out-of-memory")
    details = problem["details"]
    assert (details["layer"], details["required_bytes"]) == ("blocks.7", 3_000)
    assert details["available_bytes"] == 2_000
    refused = hand_in(client, "/v1/plans", measure_example())
    assert refused.status_code == 422
    assert refused.json()["type"].endswith(":out-of-memory")
    assert refused.json()["details"]["layer"] == "blocks.7"


def test_a_child_over_its_memory_limit_names_the_layer_it_was_at(serving):
    limit_bytes = 2**28
    eats = f"kept = b'x' * {limit_bytes + 2**26}; time.sleep(600)"
    eater = sleeping().replace("time.sleep(600)", eats)
    client = serving(eater, child_memory_bytes=limit_bytes)
    problem = ended(client, hand_in(client).json())["problem"]
    assert problem["type"].endswith(":out-of-memory")
    details = problem["details"]
    assert (details["layer"], details["available_bytes"]) == ("blocks.1", limit_bytes)
    assert details["required_bytes"] > limit_bytes


@pytest.mark.parametrize(
    ("program", "settings", "kind"),
    [
        ("import time; time.sleep(600)", {"measure_deadline_s": 0.5}, "deadline-exceeded"),
        ("import os; os.kill(os.getpid(), 11)", {}, "measurement-failed"),
        ("print('no profile')", {}, "measurement-failed"),
    ],
)
def test_a_job_that_fails_says_why(serving, program, settings, kind):
    client = serving(program, **settings)
    done = ended(client, hand_in(client).json())
    assert (done["state"], done["result"]) == ("failed", None)
    assert done["problem"]["type"].endswith(f":{kind}")


def test_a_device_nobody_has_is_waited_for_with_the_command_that_would_serve_it(serving):
    client = serving()
    body = {**JOB, "profiling": {"device": "cuda"}, "device_kind": "h200"}
    job = hand_in(client, body=body).json()
    assert job["needs"] == {"H200": 1}
    wait_for(lambda: client.get(f"/v1/jobs/{job['id']}").json()["message"] is not None)
    message = client.get(f"/v1/jobs/{job['id']}").json()["message"]
    assert "no worker offers H200" in message
    assert "stagewright worker --scheduler" in message
    assert "--resources H200=1" in message
    assert client.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"model": None, "sample": None}, "/model"),
        ({"graph_id": "graph_1"}, "/graph_id"),
        ({"device_kind": "H200"}, "/profiling/device"),
    ],
)
def test_what_makes_no_sense_together_is_refused(serving, change, pointer):
    answer = hand_in(serving(), body={**JOB, **change})
    assert answer.status_code == 422
    assert pointer in [error["pointer"] for error in answer.json()["errors"]]


def test_jobs_of_another_project_are_not_there(make_client, token):
    from stagewright.api.store.records import JobRequest
    from stagewright.api.store.store import Store

    store = Store(":memory:")
    project = store.projects.create("other")
    job = store.jobs.submit(project.id, JobRequest(kind="profile", request_json="{}"))
    store.jobs.request_cancel(project.id, job.id)
    client = make_client(store=store)
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
        assert client.request(method, f"/v1/jobs/{job.id}{path}").status_code == 404
    assert client.get("/v1/jobs").json()["jobs"] == []


def test_a_stream_ends_when_its_key_is_revoked(serving, monkeypatch):
    """Cause: it went on for as long as the job did."""
    from stagewright.api.routes import jobs as routes_jobs
    from stagewright.api.store.store import Store

    monkeypatch.setattr(routes_jobs, "CHECKED_S", 0.0)
    monkeypatch.setattr(routes_jobs, "POLL_S", 0.1)
    monkeypatch.setattr(routes_jobs, "KEEP_ALIVE_S", 0.0)  # with every poll, on a busy machine too
    store = Store(":memory:")
    client = serving(sleeping(), store=store)
    job = hand_in(client).json()
    made = store.keys.create("project_default", name="watch", scopes=["read"])
    reading: list[str] = []
    begun, format_event = threading.Event(), routes_jobs._format_event

    def format_and_tell(*args: Any) -> Any:
        begun.set()
        return format_event(*args)

    monkeypatch.setattr(routes_jobs, "_format_event", format_and_tell)

    def read() -> None:
        headers = {"Authorization": f"Bearer {made.secret}"}
        reading.append(client.get(f"/v1/jobs/{job['id']}/events", headers=headers).text)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(timeout=60)
    time.sleep(0.5)
    assert reading == [], "the job goes on, and so does the stream"
    store.keys.revoke("project_default", made.key.id)
    thread.join(timeout=60)
    assert [kind for _, kind, _ in events(reading[0])][:1] == ["queued"]
    assert ": still here\n\n" in reading[0]
    client.post(f"/v1/jobs/{job['id']}/cancel")


def test_an_idempotency_key_stays_taken_while_its_answer_takes_long(serving, profile, monkeypatch):
    monkeypatch.setattr("stagewright.api.routes.dependencies.LEASE_S", 0.3)
    client = serving(measuring(profile, seconds=1.5))
    answers: list[Any] = []
    first = threading.Thread(
        target=lambda: answers.append(
            hand_in(client, "/v1/plans", measure_example(), Idempotency_Key="k")
        )
    )
    first.start()
    time.sleep(0.9)
    second = hand_in(client, "/v1/plans", measure_example(), Idempotency_Key="k")
    assert (second.status_code, answers) == (409, [])
    first.join(timeout=20)
    assert answers[0].status_code == 201
