"""Searches end at their deadline, projects take turns, and short searches do not wait for long."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from stagewright.api.planning import solver_pool
from stagewright.api.planning.solver_pool import Solver
from stagewright.core.errors import DeadlineExceeded
from tests.api.late_search import ready, sleep_through, take_all

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def play(monkeypatch):
    """Runs a coroutine function on a solver with one process of each kind, started beforehand."""
    monkeypatch.setattr(solver_pool, "SHORT_S", 0.5)
    monkeypatch.setattr(solver_pool, "GRACE_S", 0.3)

    def run(main):
        async def started():
            solver = Solver(1)
            try:
                await solver.search(take_all, 0.6, is_final=lambda _: False)
                await solver.run(ready)
                return await main(solver)
            finally:
                solver.close()

        return asyncio.run(started())

    return run


def test_a_search_that_ignores_its_deadline_is_killed_at_it(play):
    """A request with 300,000 pins was answered after 24 s, where 1 s was asked for."""

    async def main(solver):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await solver.search(partial(sleep_through, 20.0), 1.0)
        assert time.monotonic() - began < 1.0 + 0.5 + 3 * 0.3 + 2.0
        assert solver.num_running == solver.num_waiting == 0
        assert await solver.search(partial(sleep_through, 0.0), 5.0) > 0

    play(main)


def test_a_search_cut_short_begins_anew_among_the_long_with_the_time_that_is_left(play):
    async def main(solver):
        given = await solver.search(take_all, 2.0, is_final=lambda seconds: seconds > 0.5)
        assert 0.7 < given < 1.5

    play(main)


def test_what_was_found_in_a_short_search_is_kept_if_the_long_one_has_to_be_killed(play):
    async def main(solver):
        found = await solver.search(partial(sleep_through, 0.45, 20.0), 1.2, is_final=bool)
        assert found == 0

    play(main)


def test_a_short_search_does_not_wait_for_long_ones(play):
    async def main(solver):
        long = [
            asyncio.create_task(solver.search(take_all, 4.0, is_final=lambda _: False))
            for _ in range(3)
        ]
        await asyncio.sleep(2.5)
        began = time.monotonic()
        assert await solver.search(partial(sleep_through, 0.0), 5.0, project="other") > 0
        assert time.monotonic() - began < 1.0
        await asyncio.gather(*long, return_exceptions=True)

    play(main)


def test_waiting_counts_towards_the_deadline_unless_the_caller_is_patient(play):
    async def main(solver):
        first = asyncio.create_task(solver.search(partial(sleep_through, 0.4), 5.0))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match="before a process was free"):
            await solver.search(partial(sleep_through, 0.0), 0.1)
        await first
        first = asyncio.create_task(solver.search(partial(sleep_through, 0.4), 5.0))
        await asyncio.sleep(0.1)
        assert await solver.search(partial(sleep_through, 0.0), 0.1, is_patient=True) == 0.1
        await first

    play(main)
