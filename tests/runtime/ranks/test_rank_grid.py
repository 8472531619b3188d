"""Ranks that share the work of one rank of a schedule: numbers, senders and receivers."""

import itertools

import pytest

from stagewright.core.errors import PlanMismatch
from stagewright.runtime.ranks.rank_grid import RankGrid
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.plan_schedule import count_sharing_ranks

WIDTHS = [(1, 1, 1), (2, 2), (4, 1), (1, 2, 4), (2, 4, 1, 1), (3, 2)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_rank_has_one_place(widths):
    grid = RankGrid(widths)
    places = [grid.locate(rank) for rank in range(grid.size)]
    assert places == [(each, shard) for each, width in enumerate(widths) for shard in range(width)]
    assert [grid.ranks_of(each)[shard] for each, shard in places] == list(range(sum(widths)))


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_receiver_has_one_sender_that_knows_it(widths):
    grid = RankGrid(widths)
    for source, target in itertools.permutations(range(len(widths)), 2):
        reached = [
            rank for sender in grid.ranks_of(source) for rank in grid.receivers_from(sender, target)
        ]
        assert sorted(reached) == list(grid.ranks_of(target))
        for rank in grid.ranks_of(target):
            assert rank in grid.receivers_from(grid.sender_to(rank, source), target)


def test_stages_of_one_device_need_one_degree():
    class Stage:
        def __init__(self, tensor):
            self.tensor = tensor

    class Plan:
        stages = (Stage(2), Stage(1), Stage(2), Stage(2))

    schedule = make_schedule("interleaved_1f1b", 4, 4, chunks=2)
    with pytest.raises(PlanMismatch, match=r"stage 3 is split over 2 .* over 1; use one tensor"):
        count_sharing_ranks(Plan(), schedule)
    Plan.stages = (Stage(2), Stage(1), Stage(2), Stage(1))
    assert count_sharing_ranks(Plan(), schedule) == (2, 1)
