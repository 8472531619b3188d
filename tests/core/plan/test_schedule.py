"""A schedule says who does what, and refuses what cannot be meant."""

import json

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.schedule import Schedule


def schedule(stage_ranks, ranks):
    fields = {"name": "forward_only", "num_microbatches": 2}
    return Schedule.from_json(json.dumps({**fields, "stage_ranks": stage_ranks, "ranks": ranks}))


def test_replicas_take_microbatches_in_turn():
    made = schedule(((0, 1), (2,)), (("0F0",), ("0F1",), ("1F0", "1F1")))
    assert [made.rank_of(0, index) for index in range(4)] == [0, 1, 0, 1]
    assert made.stages_of(2) == (1,)
    assert Schedule.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("stage_ranks", "ranks", "message"),
    [
        (((0, 1),), (("0F1",), ("0F0",)), "rank 0 performs 0F1, which belongs to rank 1"),
        (((0,),), (("0F0", "0F1"), ()), "rank 1 holds no stage"),
        (((0, 0),), (("0F0", "0F1"),), r"stage 0 is on ranks \(0, 0\)"),
        (((),), (("0F0", "0F1"),), r"stage 0 is on ranks \(\)"),
        (((0, 1),), (("0F0", "0F1"),), r"stage 0 is on ranks \(0, 1\) of 1"),
        (((0,),), (("1F0", "0F1"),), "rank 0 performs 1F0, a stage it does not hold"),
        (((0,),), (("0F0", "0F2"),), "0F2 names micro-batch 2 of 2"),
        (((0,),), (("0F0", "0F0"),), "0F0 is performed twice"),
        (((0,),), (("0F0",),), "1 forwards for 1 stages x 2 micro-batches"),
    ],
)
def test_what_cannot_be_meant_is_refused(stage_ranks, ranks, message):
    with pytest.raises(InvalidInput, match=message):
        schedule(stage_ranks, ranks)
