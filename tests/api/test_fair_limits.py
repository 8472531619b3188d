"""Projects take turns, whatever each of them waits for."""

from __future__ import annotations

import asyncio
import time

import pytest

from stagewright.api.fair_limits import FairTurns
from stagewright.core.errors import DeadlineExceeded


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that each want a place and keep it until told to leave."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns, self.came = turns, []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self.leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._visit(name))
            await settle()

    async def _visit(self, name: str) -> None:
        async with self.turns.place(name[0]):
            self.came.append(name)
            await self.leave[name].wait()

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await settle()


def test_a_project_with_many_waiting_delays_another_by_one_turn():
    async def main():
        visitors = Visitors(FairTurns(1))
        await visitors.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")
        await visitors.go("a1", "a2", "b1", "c1", "a3", "b2")
        assert visitors.came == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        await visitors.go("a4")
        assert visitors.turns.num_waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_place_is_not_lost_with_who_gives_up_waiting(is_handed_over):
    async def main():
        visitors = Visitors(FairTurns(1))
        await visitors.come("a1", "b1", "c1")
        if is_handed_over:  # cancelled between the hand-over and the task's next step
            visitors.leave["a1"].set()
            await asyncio.sleep(0)
        visitors.tasks["b1"].cancel()
        await settle()
        await visitors.go("a1")
        assert visitors.came in (["a1", "c1"], ["a1", "b1", "c1"])
        await visitors.go("c1")
        await visitors.come("d1")
        assert visitors.came[-1] == "d1"
        assert visitors.turns.num_waiting == 0
        await visitors.go("d1")

    asyncio.run(main())


def test_the_number_of_places_follows_what_is_offered():
    async def main():
        turns = FairTurns(1)
        visitors = Visitors(turns)
        await visitors.come("a1", "a2", "a3")
        turns.resize(3)
        await settle()
        assert visitors.came == ["a1", "a2", "a3"]
        turns.resize(1)
        await visitors.come("b1")
        await visitors.go("a1", "a2")
        assert visitors.came == ["a1", "a2", "a3"]
        await visitors.go("a3")
        assert visitors.came[-1] == "b1"
        await visitors.go("b1")

    asyncio.run(main())


def test_waiting_ends_in_time_and_leaves_no_place_taken():
    async def main():
        turns = FairTurns(1)
        visitors = Visitors(turns)
        await visitors.come("a1")
        with pytest.raises(DeadlineExceeded, match="before it was this request's turn"):
            async with turns.place("b", time.monotonic() + 0.05):
                pytest.fail("the only place is held")
        assert turns.num_waiting == 0
        await visitors.go("a1")
        async with turns.place("b", time.monotonic() - 1.0):
            assert not turns.has_room, "a free place needs no waiting"
        assert turns.has_room

    asyncio.run(main())


def test_a_project_leaves_the_last_place_to_the_others():
    async def main():
        visitors = Visitors(FairTurns(3, 2))
        await visitors.come("a1", "a2", "a3", "b1", "c1")
        assert visitors.came == ["a1", "a2", "b1"], "one for whoever comes next"
        await visitors.go("b1", "a1", "c1", "a2", "a3")
        assert visitors.came == ["a1", "a2", "b1", "c1", "a3"]
        await visitors.come("a4", "a5", "a6")
        assert visitors.came[-2:] == ["a4", "a5"]
        await visitors.go("a4", "a5", "a6")
        assert visitors.turns.num_waiting == 0

    asyncio.run(main())
