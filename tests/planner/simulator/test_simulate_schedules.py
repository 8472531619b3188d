"""Every schedule against a timeline drawn by hand."""

import pytest

from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.schedules.make_schedule import make_schedule
from tests.planner.drawing import drawn

ONES = [1, 1, 1, 1]


def test_replicas_share_the_work_of_a_slow_stage():
    times = StageTimes([2, 1], [2, 1], sync_s=[3, 0])
    timeline = simulate(make_schedule("1f1b", 2, 4, replicas=(2, 1)), times)
    assert drawn(timeline) == [
        "F0 F0 F2 F2 B0 B0 .. .. B2 B2 .. .. .. .. ..",
        "F1 F1 F3 F3 .. .. B1 B1 .. .. B3 B3 .. .. ..",
        ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. .. .. ..",
    ]
    syncs = [event for event in timeline.events if event.kind == "sync"]
    assert [(event.rank, event.start_s, event.end_s) for event in syncs] == [
        (0, 12, 15),
        (1, 12, 15),
    ]
    assert timeline.bubble_fraction == pytest.approx(1 - 24 / 45)


def test_a_replica_in_the_middle():
    times = StageTimes([1, 2, 1], [1, 2, 1])
    timeline = simulate(make_schedule("gpipe", 3, 2, replicas=(1, 2, 1)), times)
    assert drawn(timeline) == [
        "F0 F1 .. .. .. .. .. .. B0 B1",
        ".. F0 F0 .. .. .. B0 B0 .. ..",
        ".. .. F1 F1 .. .. .. B1 B1 ..",
        ".. .. .. F0 F1 B0 B1 .. .. ..",
    ]


def test_gradients_are_summed_beside_the_work_of_other_stages():
    """Stage 1 sums from 3 to 8 while stage 0 goes backward; it is what the step ends with."""
    timeline = simulate(make_schedule("1f1b", 2, 1), StageTimes([1, 1], [1, 1], sync_s=[1, 5]))
    assert timeline.step_time_s == 3 + 5
    timeline = simulate(make_schedule("1f1b", 2, 1), StageTimes([1, 1], [1, 1], sync_s=[2, 1]))
    assert timeline.step_time_s == 4 + 2


def test_a_deeper_warm_up_hides_messages():
    times = StageTimes([1, 1], [1, 1], [1], [1])
    assert drawn(simulate(make_schedule("1f1b", 2, 3), times)) == [
        "F0 F1 .. .. .. B0 F2 B1 .. .. .. B2",
        ".. .. F0 B0 F1 B1 .. .. F2 B2 .. ..",
    ]
    assert drawn(simulate(make_schedule("1f1b", 2, 3, depths=(3, 1)), times)) == [
        "F0 F1 F2 .. .. B0 .. B1 .. B2",
        ".. .. F0 B0 F1 B1 F2 B2 .. ..",
    ]


def test_forward_only():
    timeline = simulate(make_schedule("forward_only", 2, 3), StageTimes([1, 2], [0, 0]))
    assert drawn(timeline) == [
        "F0 F1 F2 .. .. .. ..",
        ".. F0 F0 F1 F1 F2 F2",
    ]


def test_zero_bubble():
    timeline = simulate(make_schedule("zero_bubble", 2, 3), StageTimes([1, 1], [2, 2]))
    assert drawn(timeline) == [
        "F0 F1 .. I0 W0 F2 I1 W1 I2 W2",
        ".. F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_zero_bubble_with_parts_of_unequal_length():
    times = StageTimes([1, 1], [3, 3], backward_input_s=[2, 2], backward_weight_s=[1, 1])
    assert drawn(simulate(make_schedule("zero_bubble", 2, 2), times)) == [
        "F0 F1 .. .. I0 I0 W0 I1 I1 W1",
        ".. F0 I0 I0 F1 I1 I1 W0 W1 ..",
    ]


def test_interleaved_1f1b():
    schedule = make_schedule("interleaved_1f1b", 4, 2, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, ONES)), stages=True) == [
        "0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1",
        "... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...",
    ]


def test_looped_bfs():
    schedule = make_schedule("looped_bfs", 4, 2, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, ONES)), stages=True) == [
        "0F0 0F1 2F0 2F1 ... ... 2B1 2B0 0B1 0B0",
        "... 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 ...",
    ]


def test_interleaved_zero_bubble():
    schedule = make_schedule("interleaved_zero_bubble", 4, 2, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, [2] * 4)), stages=True) == [
        "0F0 0F1 2F0 2F1 ... 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "... 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ]


def test_zbv():
    schedule = make_schedule("zbv", 4, 2, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, [2] * 4)), stages=True) == [
        "0F0 0F1 ... 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 ... 0I1 0W1",
        "... 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 ...",
    ]


def test_dualpipev():
    """Backwards are whole where they hide behind nothing, split in the warm-up and at the end."""
    schedule = make_schedule("dualpipev", 4, 4, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, [2] * 4)), stages=True) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3 ... 0B1 0B1 3B3 3B3 0I2 "
        "0W2 0I3 0W3",
        "... 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 "
        "1I3 2W3 1W3",
    ]


def test_dualpipev_of_fewer_microbatches_leaves_out_what_is_not_there():
    schedule = make_schedule("dualpipev", 4, 2, chunks=2)
    assert drawn(simulate(schedule, StageTimes(ONES, [2] * 4)), stages=True) == [
        "0F0 0F1 ... 3F0 3I0 3W0 3F1 3B1 3B1 0B0 0B0 ... ... 0B1 0B1",
        "... 1F0 2F0 1F1 2F1 2B0 2B0 1B0 1B0 2B1 2B1 1B1 1B1 ... ...",
    ]


def test_a_boundary_inside_a_rank_costs_nothing():
    """Stages 1 and 2 of the V are both on rank 1; the other two boundaries take 1 each way."""
    schedule = make_schedule("zbv", 4, 1, chunks=2)
    times = StageTimes(ONES, [2] * 4, [1, 5, 1], [1, 5, 1])
    assert drawn(simulate(schedule, times), stages=True) == [
        "0F0 ... ... ... ... 3F0 3I0 3W0 ... ... ... ... 0I0 0W0",
        "... ... 1F0 2F0 ... ... ... ... 2I0 2W0 1I0 1W0 ... ...",
    ]
