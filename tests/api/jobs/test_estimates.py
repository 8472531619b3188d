"""Estimates of a server without torch, by workers that have it; and who is not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.errors import WorkersUnavailable
from stagewright.api.http.examples import example_graph, measure_example
from stagewright.api.jobs.messages import WorkerLost, WorkerStarted
from stagewright.api.jobs.workers import ThreadWorkers
from stagewright.api.sandbox.child import run_confined
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from tests.api.job_children import failing

SCHEDULER = "tcp://127.0.0.1:8786"
BODY = {"graph": example_graph(), "cluster": "2xH100"}


class Fleet(ThreadWorkers):
    """WorkerBackend that say what they are told to offer."""

    def __init__(self, **offers: int) -> None:
        super().__init__()
        self.offered, self.away, self.tasks = offers, False, []

    def offers(self) -> dict[str, int]:
        if self.away:
            raise WorkersUnavailable("the scheduler does not answer")
        return self.offered

    def invitation(self, needs: str) -> str:
        return f"stagewright worker --scheduler {SCHEDULER} --resources {needs}=1"

    def submit(self, task: Any, tell: Any) -> None:
        self.tasks.append(task)
        super().submit(task, tell)


class Dying(Fleet):
    def submit(self, task: Any, tell: Any) -> None:
        tell(WorkerStarted("w"))
        self.stop(task.key)
        tell(WorkerLost("it was killed"))


@pytest.fixture
def fleet_client(token, monkeypatch) -> Any:
    """Clients of a service without torch, in front of workers of a scheduler."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("STAGEWRIGHT_SANDBOX", "off")
    opened = []

    def make(fleet: Fleet) -> TestClient:
        settings = ServerSettings(
            token=token, database=IN_MEMORY, scheduler=SCHEDULER, sandbox="off"
        )
        client = TestClient(create_app(settings, workers=fleet), base_url="http://localhost")
        client.headers["Authorization"] = f"Bearer {token}"
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def test_a_worker_estimates_for_a_server_without_torch(fleet_client: Callable[..., TestClient]):
    fleet = Fleet(cpu=1)
    client = fleet_client(fleet)
    tiers = {tier["name"]: tier for tier in client.get("/v1/capabilities").json()["models"]}
    assert tiers["graph"]["available"]
    answer = client.post("/v1/plans", json=BODY)
    assert answer.status_code == HTTPStatus.CREATED, answer.text
    assert answer.json()["plan"]["estimated"]
    assert [task.is_estimate for task in fleet.tasks] == [True]
    assert client.get("/v1/jobs").json()["jobs"] == [], "it is no job"
    other = client.post("/v1/plans", json={**BODY, "deadline_s": 7})
    assert other.headers["Stagewright-Reused"] == "profile", other.text
    assert len(fleet.tasks) == 1


def test_what_the_workers_child_says_is_told(fleet_client, child, monkeypatch):
    program = child(failing("InvalidInput", "no such kind", field="/estimate/device"))
    monkeypatch.setattr(
        "stagewright.api.model_sources.estimator.run_confined",
        lambda command, *args, **kwargs: run_confined(program, *args, **kwargs),
    )
    answer = fleet_client(Fleet(cpu=1)).post("/v1/plans", json=BODY)
    assert answer.status_code == HTTPStatus.UNPROCESSABLE_ENTITY
    (error,) = answer.json()["errors"]
    assert (error["pointer"], error["detail"]) == ("/estimate/device", "no such kind")


def test_without_a_worker_the_way_out_is_said(fleet_client):
    fleet = Fleet()
    client = fleet_client(fleet)
    answer = client.post("/v1/plans", json=BODY)
    assert answer.status_code == HTTPStatus.NOT_IMPLEMENTED
    assert "install stagewright[torch]" in answer.json()["detail"]
    assert f"stagewright worker --scheduler {SCHEDULER}" in answer.json()["detail"]
    fleet.away = True
    answer = client.post("/v1/plans", json=BODY)
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert "does not answer" in answer.json()["detail"]


def test_a_worker_that_is_lost_is_no_fault_of_the_request(fleet_client):
    answer = fleet_client(Dying(cpu=1)).post("/v1/plans", json=BODY)
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert "it was killed" in answer.json()["detail"]


def test_nobody_waits_for_a_device_that_no_worker_offers(fleet_client):
    client = fleet_client(Fleet(cpu=1))
    body = {**measure_example(), "cluster": "2xH200", "profiling": {"device": "cuda"}}
    began_s = time.monotonic()
    answer = client.post("/v1/plans", json=body)
    assert time.monotonic() - began_s < 5
    assert answer.status_code == HTTPStatus.ACCEPTED, answer.text
    assert answer.json()["state"] == "queued"
    assert "no worker offers H200" in answer.json()["message"]
    began_s = time.monotonic()
    asked = client.post("/v1/plans", json=body, headers={"Prefer": "wait=1"})
    assert time.monotonic() - began_s >= 1, "who asks to wait, waits"
    assert (asked.status_code, asked.json()["id"]) == (202, answer.json()["id"])
