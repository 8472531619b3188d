"""Schedules that could not be run are refused before anything runs."""

import json
from itertools import permutations

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.schedule import Schedule
from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.validate import validate


def written(ranks, stage_ranks, *, name="1f1b", num_microbatches=1):
    """A schedule as someone writes it: one string of actions a rank."""
    document = {
        "name": name,
        "num_microbatches": num_microbatches,
        "stage_ranks": stage_ranks,
        "ranks": [row.split() for row in ranks],
    }
    return Schedule.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "num_stages", "replicas", "chunks"),
    [
        ("gpipe", 3, (2, 1, 3), 1),
        ("1f1b", 3, (1, 2, 1), 1),
        ("interleaved_1f1b", 4, (1,) * 4, 2),
        ("looped_bfs", 4, (2,) * 4, 2),
        ("zero_bubble", 3, (1,) * 3, 1),
        ("interleaved_zero_bubble", 6, (1,) * 6, 3),
        ("zbv", 6, (1,) * 6, 2),
        ("dualpipev", 6, (2,) * 6, 2),
        ("forward_only", 3, (1,) * 3, 1),
    ],
)
def test_every_schedule_by_name_can_be_run(name, num_stages, replicas, chunks):
    validate(make_schedule(name, num_stages, 6, replicas=replicas, chunks=chunks))


def test_a_rank_may_hold_more_stages_than_another():
    rows = ["0F0 1F0 1R0 1B0 0B0", "2F0 2I0 2W0"]
    validate(written(rows, [[0], [0], [1]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0", "1F0 1B0"], "rank 0 performs 0F0 and no backward for it; add either 0B0, or"),
        (["0F0 0I0", "1F0 1B0"], "performs 0F0 and 0I0 for it; add either 0B0, or both 0I0 and"),
        (["0F0 0B0", "1F0 1B0 1W0"], "rank 1 performs 1F0 and 1B0 and 1W0 for it"),
        (["0F0 0W0 0I0", "1F0 1B0"], "rank 0 performs 0W0 before 0I0, which it needs"),
        (["0F0 0B0 0R0", "1F0 1B0"], "rank 0 performs 0B0 before 0R0, which it needs"),
        (["0F0 0B0", "1R0 1F0 1B0"], "rank 1 performs 1R0 before 1F0, which it needs"),
        (["0B0 0F0", "1F0 1B0"], "rank 0 performs 0B0 before 0F0, which it needs"),
    ],
)
def test_work_that_is_missing_or_out_of_order_is_refused(rows, message):
    with pytest.raises(InvalidInput, match=message):
        validate(written(rows, [[0], [1]]))


def test_only_forward_only_may_do_without_backwards():
    validate(written(["0F0", "1F0"], [[0], [1]], name="forward_only"))
    with pytest.raises(InvalidInput, match="no backward for it"):
        validate(written(["0F0", "1F0"], [[0], [1]]))
    with pytest.raises(InvalidInput, match=r"forward_only .* rank 0 performs 0B0; remove it"):
        validate(written(["0F0 0B0", "1F0 1B0"], [[0], [1]], name="forward_only"))


def test_ranks_that_wait_for_each_other_are_named():
    """Rank 0 wants a gradient before its second forward, rank 1 that forward before a backward."""
    rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    message = (
        "deadlocks: rank 0 cannot run 0B0 before 1B0, which comes after 1F1 on rank 1; "
        "rank 1 cannot run 1F1 before 0F1, which comes after 0B0 on rank 0"
    )
    with pytest.raises(InvalidInput, match=message):
        validate(written(rows, [[0], [1]], num_microbatches=2))


def test_a_rank_can_wait_for_itself():
    with pytest.raises(InvalidInput, match="rank 0 cannot run 1F0 before 0F0, which comes after"):
        validate(written(["1F0 0F0 1B0 0B0"], [[0], [0]]))


def test_it_agrees_with_the_simulator_on_every_order_of_a_rank():
    """All orders of rank 0's actions, against one order of rank 1."""
    times = StageTimes([1, 1], [1, 1])
    refused = 0
    for row in permutations(["0F0", "0B0", "0F1", "0B1"]):
        made = written(
            [" ".join(row), "1F0 1F1 1B1 1B0"], [[0], [1]], num_microbatches=2, name="gpipe"
        )
        try:
            simulate(made, times)
        except InvalidInput:
            refused += 1
            with pytest.raises(InvalidInput):
                validate(made)
        else:
            validate(made)
    assert 0 < refused < 24
