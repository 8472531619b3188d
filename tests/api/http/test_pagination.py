"""Lists by pages, entity tags, idempotency keys, answers known already, and who searches."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from stagewright.api.errors import SolverEnded
from stagewright.api.planning.solver_pool import Solver
from stagewright.api.planning.solver_process import MAX_BYTES
from stagewright.core.errors import InvalidInput


@pytest.fixture
def request_body(profile):
    return {"profile": profile, "cluster": "2xcpu"}


def plan_ids(client, profile, count):
    return [
        client.post("/v1/plans", json={"profile": profile, "cluster": f"{n}xcpu"}).json()["id"]
        for n in range(1, count + 1)
    ]


def test_pages_hold_every_plan_once_while_plans_are_added(client, profile):
    ids = plan_ids(client, profile, 5)
    page = client.get("/v1/plans", params={"limit": 2}).json()
    seen = [row["id"] for row in page["plans"]]
    client.post("/v1/plans", json={"profile": profile, "cluster": "9xcpu"})
    while page["next_cursor"]:
        page = client.get("/v1/plans", params={"limit": 2, "cursor": page["next_cursor"]}).json()
        seen += [row["id"] for row in page["plans"]]
    assert seen == ids[::-1]


@pytest.mark.parametrize("kind", ["plans", "profiles", "graphs"])
@pytest.mark.parametrize("params", [{"cursor": "nonsense"}, {"limit": 0}, {"limit": 501}])
def test_a_parameter_at_fault_is_named(client, kind, params):
    response = client.get(f"/v1/{kind}", params=params)
    assert response.status_code == 422
    (name,) = params
    assert response.json()["errors"][0]["parameter"] == name


def test_a_cursor_of_another_list_is_refused(client, profile):
    plan_ids(client, profile, 2)
    cursor = client.get("/v1/plans", params={"limit": 1}).json()["next_cursor"]
    assert client.get("/v1/profiles", params={"cursor": cursor}).status_code == 422


def test_what_is_held_already_is_not_sent_again(client, request_body):
    plan = client.post("/v1/plans", json=request_body).json()
    for path in (
        f"/v1/plans/{plan['id']}",
        f"/v1/plans/{plan['id']}?format=schedule",
        f"/v1/plans/{plan['id']}?format=svg",
        f"/v1/profiles/{plan['profile_id']}",
    ):
        first = client.get(path)
        tag = first.headers["ETag"].removeprefix("W/")
        assert tag.startswith('"')
        for held in (tag, f'"other", {tag}', f"W/{tag}", "*"):
            again = client.get(path, headers={"If-None-Match": held})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["ETag"].removeprefix("W/") == tag
        assert client.get(path, headers={"If-None-Match": '"other"'}).content == first.content


def test_a_key_gets_the_first_answer_again(client, request_body, monkeypatch):
    headers = {"Idempotency-Key": "one"}
    first = client.post("/v1/plans", json=request_body, headers=headers)
    monkeypatch.setattr("stagewright.api.planning.service.decide", None)
    monkeypatch.setattr("stagewright.api.planning.requests.__version__", "another")
    second = client.post("/v1/plans", json=request_body, headers=headers)
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert second.headers["Location"] == first.headers["Location"]
    assert second.headers["Idempotency-Replayed"] == "true"
    other = {**request_body, "cluster": "3xcpu"}
    reused = client.post("/v1/plans", json=other, headers=headers)
    assert reused.status_code == 422
    assert reused.json()["type"].endswith(":idempotency-key-reused")


@pytest.mark.in_threads
def test_a_key_of_a_request_that_failed_can_be_used_again(client, request_body, monkeypatch):
    def fails(*_, **__):
        raise InvalidInput("not this time")

    headers = {"Idempotency-Key": "two"}
    with monkeypatch.context() as patched:
        patched.setattr("stagewright.api.planning.decision.plan", fails)
        assert client.post("/v1/plans", json=request_body, headers=headers).status_code == 422
    assert client.post("/v1/plans", json=request_body, headers=headers).status_code == 201


def test_a_key_is_one_and_not_too_long(client, profile):
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    for headers in (twice, {"Idempotency-Key": "x" * 256}, {"Idempotency-Key": ""}):
        response = client.post("/v1/profiles", json=profile, headers=headers)
        assert response.status_code == 422
        assert response.json()["errors"][0]["parameter"].lower() == "idempotency-key"


@pytest.mark.in_threads
def test_the_same_is_not_planned_twice_and_the_answer_says_so(client, request_body, monkeypatch):
    first = client.post("/v1/plans", json=request_body)
    assert "Stagewright-Reused" not in first.headers
    with monkeypatch.context() as patched:
        patched.setattr("stagewright.api.planning.decision.plan", None)
        second = client.post("/v1/plans", json=request_body)
        assert second.json() == first.json()
        assert second.headers["Stagewright-Reused"] == "plan"
        again = client.post("/v1/plans", json=request_body, headers={"Cache-Control": "no-cache"})
        assert again.status_code == 500, "it was planned again"
    other = client.post("/v1/plans", json={**request_body, "deadline_s": 1.0})
    assert "Stagewright-Reused" not in other.headers


def test_another_release_plans_again(client, request_body, monkeypatch):
    client.post("/v1/plans", json=request_body)
    monkeypatch.setattr("stagewright.api.planning.requests.__version__", "another")
    second = client.post("/v1/plans", json=request_body)
    assert "Stagewright-Reused" not in second.headers


def test_a_search_leaves_the_server_free_and_its_death_is_a_problem(make_client, request_body):
    client = make_client(plan_processes=1)
    assert client.post("/v1/plans", json=request_body).status_code == 201
    waits: list[float] = []
    solver = Solver(1)
    search = threading.Thread(
        target=client.portal.call, args=(solver.run, partial(_spin, 2.0)), daemon=True
    )
    search.start()
    while search.is_alive():
        begin = time.perf_counter()
        assert client.get("/healthz").status_code == 200
        waits.append(time.perf_counter() - begin)
    solver.close()
    assert len(waits) > 20


def test_a_process_that_ends_is_replaced(make_client):
    client = make_client()
    solver = Solver(1)
    with pytest.raises(SolverEnded, match="ended with exit code 1;"):
        client.portal.call(solver.run, partial(os._exit, 1))
    assert client.portal.call(solver.run, os.getpid) != os.getpid()
    with pytest.raises(InvalidInput, match="GiB this server gives it"):
        client.portal.call(solver.run, partial(bytearray, 2 * MAX_BYTES))
    solver.close()


def test_short_work_does_not_wait_for_searches(make_client):
    """Cause: two searches kept every what-if waiting to their end."""
    client = make_client()
    solver = Solver(1)

    def endless() -> None:
        with suppress(SolverEnded):
            client.portal.call(solver.search, time.sleep, 600)

    searches = [threading.Thread(target=endless) for _ in range(2)]
    for search in searches:
        search.start()
    end = time.monotonic() + 30
    while (solver.num_running, solver.num_waiting) != (2, 0):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert client.portal.call(solver.run, os.getpid) != os.getpid()
    assert (solver.num_running, solver.num_waiting) == (2, 0)
    solver.close()
    for search in searches:
        search.join(30)
        assert not search.is_alive(), "a closed one starts nothing more"


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_drawings_are_made_where_plans_are_searched_for_and_not_for_who_has_them(
    client, request_body, monkeypatch
):
    """Cause: six timelines at once kept the interpreter, and every other request, for seconds."""
    made = []
    run = Solver.run

    async def watched(self, work, **turn):
        made.append(work.func.__name__)
        return await run(self, work, **turn)

    plan = client.post("/v1/plans", json=request_body).json()
    monkeypatch.setattr(Solver, "run", watched)
    names = ("schedule", "timeline", "svg", "chrome_trace")
    forms = [f"/v1/plans/{plan['id']}?format={form}" for form in names]
    for path in [*forms, f"/v1/profiles/{plan['profile_id']}?format=csv"]:
        first = client.get(path)
        assert first.status_code == 200, first.text
        assert made.pop() in ("plan_text", "profile_text")
        held = {"If-None-Match": first.headers["ETag"]}
        assert client.get(path, headers=held).status_code == 304
        assert not made, "it was made for somebody who holds it"
        gone = path.replace("plan_", "plan_0").replace("profile_", "profile_0")
        assert client.get(gone, headers=held).status_code == 404
    assert len(client.get(forms[0]).json()["ranks"]) == plan["plan"]["cluster_devices"]
