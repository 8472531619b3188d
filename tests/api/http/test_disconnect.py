"""A search ends with the connection of who asked for it, and with nobody else's."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from functools import partial
from multiprocessing import active_children

import pytest

from stagewright.api.errors import SolverEnded
from stagewright.api.http.disconnect import while_connected
from stagewright.api.http.problems import Problem
from stagewright.api.planning.solver_pool import NUM_SPARES, Solver
from tests.api.late_search import DURATION_S, late, ready, sleep_through

pytestmark = pytest.mark.timeout(60)


async def until(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def test_a_search_that_is_cancelled_ends_its_process_and_no_other():
    before = set(active_children())

    def new():
        return set(active_children()) - before

    async def main():
        solver = Solver(2)
        complaints = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        try:
            stays, leaves = (
                asyncio.create_task(solver.search(partial(sleep_through, 1.5), 30.0))
                for _ in range(2)
            )
            await until(lambda: solver.num_running == 2)
            num_before = len(new())
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            await until(lambda: len(new()) == num_before - 1)
            assert await asyncio.gather(solver.run(ready), solver.run(ready)) == [7, 7]
            assert await stays > 0
            assert solver.num_running == solver.num_waiting == 0
            with pytest.raises(SolverEnded):
                await solver.run(partial(os._exit, 1))
            gc.collect()
            assert complaints == []
        finally:
            solver.close()

    asyncio.run(main())


def test_work_is_done_while_somebody_waits_and_errors_are_its_own():
    async def stays():
        await asyncio.Event().wait()

    async def leaves():
        return {"type": "http.disconnect"}

    async def answer(error=None):
        await asyncio.sleep(0)
        if error:
            raise error
        return 7

    async def main():
        assert await while_connected(stays, answer()) == 7
        with pytest.raises(KeyError):
            await while_connected(stays, answer(KeyError("own")))
        with pytest.raises(Problem) as caught:
            await while_connected(leaves, asyncio.Event().wait())
        assert caught.value.document.status == 499

    asyncio.run(main())


@pytest.fixture
def request_body(profile):
    return {"profile": profile, "cluster": "2xcpu"}


@pytest.fixture
def ask_and_leave(make_client, request_body, monkeypatch):
    """Sends a request for a plan, leaves once it is searched for, and gives what was answered."""
    monkeypatch.setattr("stagewright.api.planning.service.decide", late)
    client, body = make_client(plan_processes=1), json.dumps(request_body).encode()

    def is_searched_for():
        return "stagewright_solver_running 1.0" in client.get("/metrics").text

    async def go(headers):
        pending = [body]
        sent, left = [], asyncio.Event()

        async def receive():
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        said = {"content-type": "application/json", "host": "localhost", **headers}
        said["authorization"] = client.headers["authorization"]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/plans", "raw_path": b"/v1/plans", "query_string": b"",
            "root_path": "", "server": ("localhost", 80), "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in said.items()],
        }  # fmt: skip
        answered = asyncio.create_task(client.app(scope, receive, send))
        while not await asyncio.to_thread(is_searched_for):
            assert not answered.done()
        left.set()
        begin = time.monotonic()
        await answered
        return sent[0]["status"], time.monotonic() - begin

    return client, lambda **headers: client.portal.call(go, headers)


def test_a_search_nobody_waits_for_is_ended_and_kept_nowhere(ask_and_leave, request_body):
    client, leave = ask_and_leave
    before = set(active_children())
    status, took_s = leave()
    assert (status, took_s < DURATION_S / 2) == (499, True)
    time.sleep(0.1)
    left = [child for child in active_children() if child not in before]
    assert len(left) <= NUM_SPARES, "only those that were started for the next searches"
    assert client.get("/v1/plans").json()["plans"] == []
    status, _ = leave(**{"idempotency-key": "mine"})
    assert status == 201
    (kept,) = client.get("/v1/plans").json()["plans"]
    headers = {"Idempotency-Key": "mine", "Content-Type": "application/json"}
    again = client.post("/v1/plans", content=json.dumps(request_body), headers=headers)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.json()["id"] == kept["id"]
