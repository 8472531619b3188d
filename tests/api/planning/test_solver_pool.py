"""Searches end at their deadline, projects take turns, and short searches do not wait for long."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing import active_children

import pytest

from stagewright.api.http.examples import example_graph
from stagewright.api.planning import solver_pool
from stagewright.api.planning.progress import PlanningPhases, SearchProgress
from stagewright.api.planning.solver_pool import NUM_SPARES, Solver
from stagewright.api.planning.solver_process import LONG_NICENESS, SolverProcess
from stagewright.api.telemetry.tracing import fresh
from stagewright.core.errors import DeadlineExceeded
from tests.api.late_search import overrun, ready, report, sleep_through, take_all, take_all_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def play(monkeypatch):
    """Runs a coroutine function on a solver with one long place, its processes started."""
    monkeypatch.setattr(solver_pool, "SHORT_S", 0.5)
    monkeypatch.setattr(solver_pool, "GRACE_S", 0.3)

    def run(main):
        async def started():
            solver = Solver(1)
            try:
                searches = [solver.search(partial(sleep_through, 0.0), 60.0) for _ in range(2)]
                await asyncio.gather(*searches, solver.run(ready))
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


def test_a_process_that_is_long_in_starting_is_not_waited_for_beyond_the_deadline(
    play, monkeypatch
):
    """On a server just started, 1 s asked for took 6 s."""

    async def main(solver):
        with monkeypatch.context() as patch:
            patch.setattr(SolverProcess, "warm_up", lambda self, function: Future())
            patch.setattr(SolverProcess, "is_warm", lambda self, function: False)
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="nothing was found within 1 s"):
                await asyncio.wait_for(solver.search(partial(sleep_through, 0.0), 1.0), 20)
            assert time.monotonic() - began < 1.0 + 2.0
        assert await solver.search(partial(sleep_through, 0.0), 20.0) > 0

    play(main)


def test_a_search_that_takes_longer_goes_on_with_less_priority(play):
    async def main(solver):
        process_id, niceness = await solver.search(partial(take_all_of, 1.5), 5.0)
        assert niceness == LONG_NICENESS
        end = time.monotonic() + 20
        while process_id in {child.pid for child in active_children()}:
            assert time.monotonic() < end, "it would search with low priority for ever"
            await asyncio.sleep(0.02)

    play(main)


def test_beyond_the_long_places_a_search_begins_again_when_one_is_free(play):
    async def main(solver):
        searches = [
            asyncio.create_task(solver.search(partial(take_all_of, 1.5), 30.0, project=project))
            for project in "aab"
        ]
        ends = [time.monotonic() for search in searches if await search]
        assert len(ends) == 3
        assert len({(await search)[0] for search in searches}) == 3

    play(main)


def test_as_many_searches_as_long_places_leave_a_short_one(play, monkeypatch):
    monkeypatch.setattr(solver_pool, "SHORT_S", 20.0)

    async def main(solver):
        heavy = asyncio.create_task(solver.search(partial(sleep_through, 5.0), 30.0))
        await asyncio.sleep(0.1)
        assert await solver.search(partial(sleep_through, 0.0), 30.0, project="other") > 0
        assert not heavy.done(), "it has waited for a search in its first seconds"
        heavy.cancel()

    play(main)


def test_a_short_search_does_not_wait_for_long_ones(play):
    async def main(solver):
        long = asyncio.create_task(solver.search(take_all, 30.0))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert await solver.search(partial(sleep_through, 0.0), 5.0, project="other") > 0
        assert time.monotonic() - began < 8.0
        long.cancel()

    play(main)


def test_waiting_counts_towards_the_deadline_unless_the_caller_is_patient(play):
    async def main(solver):
        def take_short_places():
            asleep = [solver.search(partial(sleep_through, 0.4), 5.0) for _ in range(2)]
            return asyncio.gather(*asleep)

        first = take_short_places()
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match="before it was this"):
            await solver.search(partial(sleep_through, 0.0), 0.1)
        await first
        first = take_short_places()
        await asyncio.sleep(0.1)
        assert await solver.search(partial(sleep_through, 0.0), 0.1, is_patient=True) > 0.09
        await first

    play(main)


def test_a_search_that_is_about_to_end_keeps_its_place(play):
    """Cause: with every long place taken it was killed, and told that it had had no turn."""

    async def main(solver):
        long = asyncio.create_task(solver.search(take_all, 30.0))
        await asyncio.sleep(0.8)
        assert not solver._long.has_room
        assert await solver.search(take_all, 0.7) > 0.5
        long.cancel()

    play(main)


def test_other_work_takes_turns_and_leaves_a_process_for_searches(play):
    """Cause: one project's drawings kept every process, and searches of others ran out of time."""

    async def main(solver):
        ends = []

        async def draw(project):
            await solver.run(partial(time.sleep, 1.0), project=project)
            ends.append(project)

        drawings = [asyncio.create_task(draw(project)) for project in "aaaaab"]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert await solver.search(partial(sleep_through, 0.0), 20.0, project="b") > 0
        assert len(ends) < 6, "it has waited for all of them"
        await asyncio.gather(*drawings)
        assert ends.index("b") < 4, f"its turn came last: {ends}"
        assert time.monotonic() - began < 60

    play(main)


def test_other_work_does_not_wait_for_ever(play, monkeypatch):
    async def main(solver):
        work = partial(time.sleep, 1.5)
        asleep = [asyncio.create_task(solver.run(work, project=name)) for name in "ab"]
        await asyncio.sleep(0.2)
        monkeypatch.setattr(solver_pool, "MAX_WORK_S", 0.3)
        with pytest.raises(DeadlineExceeded, match="before it was this"):
            await solver.run(ready)
        await asyncio.gather(*asleep)

    play(main)


def test_a_search_is_observed_once_however_often_it_began(play):
    async def main(solver):
        observed = []
        solver._observe = lambda name, duration_s: observed.append((name, duration_s))
        searches = [solver.search(partial(take_all_of, 1.5), 30.0, project=name) for name in "ab"]
        await asyncio.gather(*searches)
        assert [name for name, _ in observed] == ["take_all_of"] * 2
        assert min(duration_s for _, duration_s in observed) > 1.4

    play(main)


def test_the_best_plan_so_far_is_known_while_a_search_goes_on(play):
    """Its short place ends after half of it; the next search in a process has found nothing yet."""

    async def main(solver):
        for value in (3.0, 5.0):
            progress = SearchProgress("step_time")
            assert progress.describe() == "Searching for the best cuts …"
            work = partial(report, value, 2.0)
            search = asyncio.create_task(solver.search(work, 10.0, progress=progress))
            await asyncio.sleep(0.8)
            assert not search.done()
            wanted = f"Searching: {value:g} s so far, lower bound 2 s …"
            assert progress.describe() == wanted
            await search
        await solver.search(partial(report, 3.0, 2.0), 0.2)  # its process is used again
        progress = SearchProgress("step_time")
        search = solver.search(partial(report, 0.0, 0.0), 0.4, progress=progress)
        asleep = asyncio.create_task(search)
        await asyncio.sleep(0.2)
        assert progress.best
        assert progress.describe() == "Searching for the best cuts …"
        await asleep

    play(main)


def test_the_phase_of_a_request_is_known_to_its_project_until_it_ends():
    phases = PlanningPhases()
    with fresh(request_id="one"), phases.phase("mine", "Estimating"):
        assert phases.describe("mine", "one") == "Estimating"
        assert phases.describe("other", "one") == phases.describe("mine", "two") == ""
    assert phases.describe("mine", "one") == ""


def test_processes_for_the_next_searches_start_beside_the_first():
    """Cause: three plans of sixty beside heavy searches waited 3 s for a process to start."""

    async def main():
        solver = Solver(2)
        try:
            await solver.search(partial(sleep_through, 0.0), 30.0)
            end = time.monotonic() + 60
            while sum(idle.is_warm(sleep_through) for idle in solver._idle) < 1 + NUM_SPARES:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
        finally:
            solver.close()

    asyncio.run(main())


def test_a_client_gets_its_answer_at_its_deadline_whatever_the_search_does(
    make_client, profile, monkeypatch
):
    client = make_client(plan_processes=1)
    body = {"profile": profile, "cluster": "2xcpu", "deadline_s": 20.0}
    first = client.post("/v1/plans", json=body)
    assert first.status_code == 201, first.text
    body["deadline_s"] = 1.0
    monkeypatch.setattr("stagewright.api.planning.service.decide", overrun)
    began = time.monotonic()
    answer = client.post("/v1/plans", json=body, headers={"Cache-Control": "no-cache"})
    assert time.monotonic() - began < 1.0 + 2.0 + 12.0, "the last are for a busy machine"
    assert answer.status_code == 422
    assert answer.json()["type"].endswith(":deadline-exceeded")


def test_an_estimate_counts_towards_the_deadline_of_its_request(make_client, child, tmp_path):
    """Cause: an answer could take two minutes, whatever the request's deadline was."""
    alive = tmp_path / "alive"
    program = (
        f"import os, sys, time; sys.stdin.read(); open({str(alive)!r}, 'w').write(str(os.getpid()))"
        "; time.sleep(100)"
    )
    client = make_client(estimate_command=child(program), sandbox="off")  # it writes a file
    body = {"graph": example_graph(), "cluster": "2xH100", "deadline_s": 5}
    began = time.monotonic()
    answer = client.post("/v1/plans", json=body)
    assert time.monotonic() - began < 20.0, "most of it is for a busy machine"
    assert answer.status_code == 422
    assert "no estimate within 5 s; allow more time" in answer.json()["detail"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(alive.read_text()), 0)
