"""Metrics: what is counted, who may read it, and that no stranger can make a label."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stagewright.api.jobs.runner import JobRunner
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.errors import StoreUnavailable
from stagewright.api.store.records import DEFAULT_PROJECT, JobRequest
from stagewright.api.store.store import Store
from stagewright.api.telemetry.metrics import Metrics

REQUESTS = "stagewright_http_requests_total"


def samples(text):
    """Values by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def read(client):
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return samples(answer.text)


def requests(found, **labels):
    """Requests counted under some labels."""
    return sum(
        value
        for (name, *have), value in found.items()
        if name == REQUESTS and labels.items() <= dict(have).items()
    )


def test_requests_are_counted_by_route_method_and_class(client, profile):
    for _ in range(3):
        client.get("/v1/plans/plan_1")
    client.get("/v1/plans/plan_2")
    client.post("/v1/profiles", json=profile)
    client.get("/v1/profiles?limit=0")
    found = read(client)
    assert requests(found, route="/v1/plans/{plan_id}", method="GET", status="4xx") == 4
    assert requests(found, route="/v1/profiles", method="POST", status="2xx") == 1
    assert requests(found, route="/v1/profiles", method="GET", status="4xx") == 1
    duration = "stagewright_http_request_duration_seconds"
    labels = (("method", "GET"), ("route", "/v1/plans/{plan_id}"))
    assert found[f"{duration}_count", *labels] == 4
    assert found[f"{duration}_sum", *labels] > 0
    assert found["stagewright_http_requests_in_flight",] == 1, "this one"


def test_no_stranger_makes_a_label(make_client):
    client, stranger = make_client(), make_client(authorized=False)
    for asking in (client, stranger):
        for number in range(5):
            asking.get(f"/nowhere/{number}")
            asking.request(f"METHOD{number}", "/v1/plans")
            asking.get(f"/v1/plans/plan_{number}")
        before = {key for key in samples(asking.app.state.metrics.text().decode())}
        asking.get("/nowhere/else")
        asking.request("OTHER", "/v1/plans/x")
        after = {key for key in samples(asking.app.state.metrics.text().decode())}
        assert {dict(key[1:]).get("route") for key in after - before} <= {"/v1/plans/{plan_id}"}
    routes = {
        dict(labels).get("route")
        for name, *labels in samples(stranger.app.state.metrics.text().decode())
        if name == REQUESTS
    }
    assert routes == {"unmatched"}


def test_a_bug_is_a_5xx_and_counted(client):
    @client.app.get("/v1/broken")
    def broken():
        raise RuntimeError("a bug")

    assert client.get("/v1/broken").status_code == 500
    assert requests(read(client), route="/v1/broken", status="5xx") == 1


def test_what_was_found_out_before_is_counted(client, profile):
    body, key = {"profile": profile, "cluster": "2xcpu"}, {"Idempotency-Key": "k"}
    client.post("/v1/plans", json=body)
    client.post("/v1/plans", json=body)
    client.post("/v1/profiles", json=profile, headers=key)
    client.post("/v1/profiles", json=profile, headers=key)
    found = read(client)
    assert found["stagewright_reused_total", ("what", "plan")] == 1
    assert found["stagewright_reused_total", ("what", "answer")] == 1
    assert ("stagewright_reused_total", ("what", "profile")) not in found


def test_searches_are_timed_and_queues_seen(client, profile):
    client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"})
    body = {"profile": profile, "cluster": "2xcpu", "balance": [1, len(profile["layers"]) - 1]}
    assert client.post("/v1/simulations", json=body).status_code == 200
    found = read(client)
    name = "stagewright_solver_duration_seconds"
    assert found[f"{name}_count", ("work", "decide")] == 1
    assert found[f"{name}_count", ("work", "price")] == 1
    assert found["stagewright_solver_waiting",] == found["stagewright_solver_running",] == 0


def test_jobs_are_those_in_the_store(make_client, monkeypatch):
    monkeypatch.setattr(JobRunner, "take", lambda runner, job: None)
    store = Store(IN_MEMORY)
    client = make_client(store=store)
    jobs = [
        store.jobs.submit(DEFAULT_PROJECT, JobRequest(kind=kind, request_json="{}"))
        for kind in ("profile", "profile", "plan")
    ]
    store.jobs.start(jobs[0].id, attempt=0, worker="w")
    found = read(client)
    assert found["stagewright_store_up",] == 1
    assert {key[1:]: value for key, value in found.items() if key[0] == "stagewright_jobs"} == {
        (("kind", "plan"), ("state", "queued")): 1,
        (("kind", "profile"), ("state", "queued")): 1,
        (("kind", "profile"), ("state", "running")): 1,
    }


def test_what_jobs_took_can_be_told():
    metrics = Metrics()
    metrics.job_started("profile", 0.3)
    metrics.job_ended("profile", "failed", 2.0)
    found = samples(metrics.text().decode())
    assert found["stagewright_job_queued_seconds_sum", ("kind", "profile")] == 0.3
    labels = (("kind", "profile"), ("state", "failed"))
    assert found["stagewright_job_duration_seconds_sum", *labels] == 2.0


def test_without_its_database_the_rest_is_told(make_client):
    class Gone(Store):
        def check(self):
            raise StoreUnavailable("secret-host does not answer")

    answer = make_client(store=Gone(IN_MEMORY)).get("/metrics")
    found = samples(answer.text)
    assert found["stagewright_store_up",] == 0
    assert not [key for key in found if key[0] == "stagewright_jobs"]
    assert "secret-host" not in answer.text
    assert found["process_resident_memory_bytes",] > 10_000_000
    assert any(key[0] == "stagewright_build_info" for key in found)


@pytest.mark.parametrize(("scopes", "status"), [(["metrics"], 200), (["read", "admin"], 403)])
def test_they_need_a_scope_of_their_own(make_client, scopes, status):
    """An admin is one project's; these numbers are of all."""
    store = Store(IN_MEMORY)
    secret = store.keys.create(DEFAULT_PROJECT, name="n", scopes=scopes).secret
    client = make_client(store=store, authorized=False)
    answer = client.get("/metrics", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code == status
    if status == 200:
        headers = {"Authorization": f"Bearer {secret}"}
        assert client.get("/v1/plans", headers=headers).status_code == 403


def test_two_servers_in_one_process_count_apart(make_client):
    first, second = make_client(), make_client()
    first.get("/v1/plans")
    assert requests(read(first), route="/v1/plans") == 1
    assert requests(read(second), route="/v1/plans") == 0


def test_they_can_have_a_listener_of_their_own():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics = Metrics()
    metrics.worked("decide", 1.0)
    stop = metrics.listen(f"127.0.0.1:{port}")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b'solver_duration_seconds_count{work="decide"} 1.0' in answer.read()
        with pytest.raises(OSError, match="use"):
            Metrics().listen(f"127.0.0.1:{port}")
    finally:
        stop()
