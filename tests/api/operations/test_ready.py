"""Readiness, and the order in which a server ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from multiprocessing import active_children

import httpx2
import pytest

from stagewright.api import services
from stagewright.api.app import create_app
from stagewright.api.http.problems import RETRY_AFTER_S
from stagewright.api.middleware.graceful_shutdown import GracefulShutdown
from stagewright.api.planning.solver_pool import Solver
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.errors import StoreUnavailable
from stagewright.api.store.store import Store
from tests.api.conftest import TOKEN


class Now:
    """A clock that stands until it is moved."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def now():
    return Now()


def test_a_server_is_ready(make_client):
    answer = make_client(authorized=False).get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"


class Gone(Store):
    def check(self):
        raise StoreUnavailable("database postgresql://secret-host: connection refused")


def test_what_is_not_ready_is_named_and_no_more(make_client, caplog):
    client = make_client(store=Gone(IN_MEMORY), authorized=False)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Retry-After"] == str(RETRY_AFTER_S)
    problem = answer.json()
    assert problem["not_ready"] == ["database"]
    assert problem["type"].endswith(":not-ready")
    assert "secret-host" not in answer.text
    assert "secret-host" in caplog.text
    assert client.get("/healthz").status_code == 200, "starting it anew would mend nothing"


def test_another_releases_tables_are_not_ready(make_client):
    store = Store(IN_MEMORY)
    client = make_client(store=store, authorized=False)
    with store._database.write() as connection:
        connection.exec_driver_sql("UPDATE schema_revision SET revision = '9999'")
    assert client.get("/readyz").json()["not_ready"] == ["database"]


def test_a_dead_planning_process_is_replaced_and_none_at_all_is_not_ready(monkeypatch, make_client):
    monkeypatch.setattr(services, "Solver", Solver)  # not with processes of other tests
    client = make_client(plan_processes=1)
    solver = Solver(1)
    try:
        pid = client.portal.call(solver.run, os.getpid)
        (process,) = (child for child in active_children() if child.pid == pid)
        os.kill(pid, signal.SIGKILL)
        process.join(20)
        solver.check()
        assert client.portal.call(solver.run, os.getpid) != pid
    finally:
        solver.close()

    def fails(*arguments, **options):
        raise OSError("no more processes")

    monkeypatch.setattr("stagewright.api.planning.solver_process.ProcessPoolExecutor", fails)
    assert make_client(plan_processes=1).get("/readyz").json()["not_ready"] == ["solver"]


def test_a_server_ends_in_order(now):
    """Not ready at once, refusing after the delay, done when the last request is answered."""
    phases = []

    async def end():
        shutdown = GracefulShutdown(delay_s=10, grace_s=30, now=now)
        shutdown.on_refusing(lambda: phases.append("handed back"))
        request = shutdown.request()
        request.__enter__()
        assert not shutdown.is_draining
        shutdown.begin()
        for moment in (0, 9, 10, 11, 39):
            now.time = 100.0 + moment
            assert not await shutdown.step()
            await asyncio.sleep(0)
            phases.append((moment, shutdown.phase))
            shutdown.begin()
        request.__exit__(None, None, None)
        assert await shutdown.step()

    asyncio.run(end())
    assert phases == [
        (0, "leaving"), (9, "leaving"), "handed back", (10, "refusing"), (11, "refusing"),
        (39, "refusing"),
    ]  # fmt: skip


@pytest.mark.parametrize("keeps", ["a request", "what is handed back"])
def test_the_grace_ends(now, keeps):
    async def end():
        shutdown = GracefulShutdown(grace_s=30, now=now)
        request = shutdown.request()
        if keeps == "a request":
            request.__enter__()
        else:
            shutdown.on_refusing(asyncio.Event().wait)
        shutdown.begin()
        assert not await shutdown.step()
        await asyncio.sleep(0)
        now.time += 29
        assert not await shutdown.step()
        now.time += 1
        assert await shutdown.step()

    asyncio.run(end())


def test_what_cannot_hand_back_keeps_nobody_alive(now, caplog):
    async def end():
        shutdown = GracefulShutdown(now=now)
        done = []
        shutdown.on_refusing(lambda: 1 / 0)
        shutdown.on_refusing(lambda: done.append(True))
        shutdown.begin()
        await shutdown.step()
        await asyncio.sleep(0)
        assert done == [True]
        assert await shutdown.step()

    asyncio.run(end())
    assert "could not hand unfinished work back" in caplog.text


def test_while_it_ends_it_begins_nothing_and_answers_the_rest(profile):
    """One request is being answered when the end begins; others come afterwards."""
    shutdown = GracefulShutdown(delay_s=1, grace_s=60)
    settings = ServerSettings(token=TOKEN, database=IN_MEMORY, sandbox="off")
    app = create_app(settings, shutdown=shutdown)
    entered, leave = threading.Event(), threading.Event()

    @app.get("/v1/slow")
    def slow():
        entered.set()
        leave.wait(20)
        return {}

    async def end():
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        async with client, app.router.lifespan_context(app):
            in_flight = asyncio.create_task(client.get("/v1/slow"))
            await asyncio.to_thread(entered.wait, 20)
            shutdown.begin()
            assert not await shutdown.step()
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.json()["not_ready"]) == (503, ["draining"])
            assert (await client.post("/v1/profiles", json=profile)).status_code == 201, "delay"

            shutdown.refuse()
            refused = await client.post("/v1/profiles", json=profile)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
            assert refused.json()["type"].endswith(":service-stopping")
            assert (await client.get("/v1/profiles")).status_code == 200
            assert (await client.delete("/v1/api-keys/key_1")).status_code == 404
            assert (await client.get("/healthz")).status_code == 200
            assert b"stagewright_draining 1.0" in app.state.metrics.text()
            assert not await shutdown.step(), "one is still being answered"
            leave.set()
            assert (await in_flight).status_code == 200
            assert await shutdown.step()

    asyncio.run(end())


def test_a_stream_of_events_keeps_nobody_alive():
    shutdown = GracefulShutdown()
    with shutdown.request() as release:
        assert shutdown.num_in_flight == 1
        release()
        release()
        assert shutdown.num_in_flight == 0
    assert shutdown.num_in_flight == 0


def test_a_database_that_hangs_is_not_ready_and_holds_nobody_up(make_client, monkeypatch):
    """Also when every thread that it is given has been lost to it."""
    hanging = threading.Event()

    class Hangs(Store):
        def check(self):
            hanging.wait(20)

    monkeypatch.setattr("stagewright.api.routes.operations.CHECK_S", 0.02)
    client = make_client(store=Hangs(IN_MEMORY), authorized=False)
    try:
        for _ in range(6):
            assert client.get("/readyz").json()["not_ready"] == ["database"]
        assert client.get("/healthz").status_code == 200
    finally:
        hanging.set()


READ_ONLY = "PRAGMA query_only = ON"
FULL = (
    "CREATE TRIGGER full BEFORE UPDATE ON schema_revision "
    "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
)


@pytest.mark.parametrize("statement", [READ_ONLY, FULL], ids=["read-only", "full"])
def test_a_database_that_takes_no_write_is_not_ready(make_client, statement):
    """On a full disk a transaction begins, and a write in it fails."""
    store = Store(IN_MEMORY)
    client = make_client(store=store, authorized=False)
    with store._database.write() as connection:
        connection.exec_driver_sql(statement)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["not_ready"]) == (503, ["database"])
