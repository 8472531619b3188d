"""A search that is ended leaves the best plan that it has found.

Cause: of one request on a cold server, a deadline of 1 s gave a plan, 5 s and 20 s gave none.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import pytest

from stagewright.api.errors import SolverEnded
from stagewright.api.planning.solver_pool import GRACE_S, SHORT_S, Solver
from stagewright.api.planning.solver_process import report_best
from stagewright.core.errors import DeadlineExceeded, InvalidInput, StagewrightError
from stagewright.planner.problem.problem import Progress


def search(values, ends, seconds):
    """Report plans of these values, and end in that way."""
    for value in values:
        report_best(Progress(0.0, value), lambda value=value: f"plan of {value}")
    if ends == "killed":
        os._exit(9)
    if ends == "out of memory":
        raise MemoryError
    if ends == "too late":
        raise DeadlineExceeded("nothing was found")
    if ends == "overrun":
        time.sleep(60.0)
    return b"the answer"


def begun_again(marks, seconds):
    """Report a worse plan at the second beginning, and overrun at both."""
    first = not Path(marks).exists()
    Path(marks).touch()
    report_best(Progress(0.0, 2.0 if first else 3.0), lambda: "first" if first else "second")
    time.sleep(60.0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A folder for temporary files that services of other tests do not write into."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leftovers():
    return list(Path(gettempdir()).glob("stagewright-*.json")) + list(
        Path(gettempdir()).glob("stagewright-*.partial")
    )


def asked(work):
    """Return the answer of a search, or the error that it ends with."""

    async def main():
        solver = Solver(1)
        try:
            return await solver.search(work, 10.0, read_kept=bytes)
        except StagewrightError as error:
            return error
        finally:
            solver.close()

    return asyncio.run(main())


@pytest.mark.parametrize("ends", ["killed", "out of memory", "too late", "overrun"])
def test_the_best_plan_is_the_answer(ends):
    assert asked(partial(search, (3.0, 2.0, 2.5), ends)) == b"plan of 2.0"
    assert leftovers() == []


def test_a_search_that_ends_answers_itself():
    assert asked(partial(search, (3.0,), "well")) == b"the answer"
    assert leftovers() == []


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("killed", SolverEnded),
        ("out of memory", InvalidInput),
        ("too late", DeadlineExceeded),
        ("overrun", DeadlineExceeded),
    ],
)
def test_without_a_plan_the_reason_is_told(ends, error):
    assert isinstance(asked(partial(search, (), ends)), error)


def test_plans_are_of_their_own_search():
    """One process after the other, of which the second has found nothing."""

    async def main():
        solver = Solver(1)
        try:
            work = partial(search, (1.0,), "overrun")
            assert await solver.search(work, 8.0, read_kept=bytes) == b"plan of 1.0"
            with pytest.raises(DeadlineExceeded):
                await solver.search(partial(search, (), "overrun"), 2.0, read_kept=bytes)
        finally:
            solver.close()

    asyncio.run(main())


def test_a_search_that_begins_again_keeps_the_better_plan(tmp_path):
    """In a long place that was not free at first, it had found a better one before."""

    async def main():
        solver = Solver(1)
        try:
            work = partial(begun_again, str(tmp_path / "began"))
            async with solver._long.place("other"):
                asking = asyncio.create_task(solver.search(work, 8.0, read_kept=bytes))
                await asyncio.sleep(1.0)
                async with solver._short.place("a"):  # another search waits for its short one
                    waiting = asyncio.create_task(solver.search(partial(search, (), "well"), 9.0))
                    await asyncio.sleep(SHORT_S + GRACE_S)
                assert await waiting == b"the answer"
            assert await asking == b"first"
        finally:
            solver.close()

    asyncio.run(main())
