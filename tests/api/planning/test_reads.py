"""Drawings, exports and simulations of one project leave room, and processes, to the others.

Cause: a key that only reads held all processes for such work, a minute each, whether or not its
clients were still there.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial

import pytest

from stagewright.api.errors import TooManyWaiting
from stagewright.api.planning.solver_pool import MAX_ASKED, Solver

LONG_S = 30.0


def sleep_in(duration_s):
    """Sleep, and return the process."""
    time.sleep(duration_s)
    return os.getpid()


@pytest.fixture
def solver():
    found = Solver(2)
    yield found
    found.close()


async def begin(solver, project, num, duration_s=LONG_S):
    """Return calls of a project, as many as can run being under way."""
    calls = [
        asyncio.create_task(solver.run(partial(sleep_in, duration_s), project=project))
        for _ in range(num)
    ]
    await asyncio.sleep(0)
    return calls


async def running(solver, num):
    while solver.num_running < num:
        await asyncio.sleep(0.01)


def test_a_project_leaves_a_process_to_the_others(solver):
    async def main():
        calls = await begin(solver, "a", 10)
        await running(solver, 2)
        assert await asyncio.wait_for(solver.run(partial(sleep_in, 0.0), project="b"), LONG_S / 2)
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()

    asyncio.run(main())


def test_a_project_asks_for_so_much_and_no_more(solver):
    async def main():
        calls = await begin(solver, "a", MAX_ASKED)
        with pytest.raises(TooManyWaiting, match=f"{MAX_ASKED} drawings"):
            await solver.run(partial(sleep_in, 0.0), project="a")
        calls[-1].cancel()
        await asyncio.sleep(0.1)
        calls += await begin(solver, "a", 1)
        await asyncio.sleep(0.1)
        assert not calls[-1].done(), "the turn of one that left is free again"
        for call in calls:
            call.cancel()

    asyncio.run(main())


def test_a_client_that_leaves_ends_no_process(solver):
    async def main():
        first = await solver.run(partial(sleep_in, 0.0), project="a")
        (call,) = await begin(solver, "a", 1, 0.5)
        await running(solver, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert solver.num_running == 1, "what runs goes on, in its place"
        while solver.num_running:
            await asyncio.sleep(0.01)
        assert await solver.run(partial(sleep_in, 0.0), project="a") == first

    asyncio.run(main())
