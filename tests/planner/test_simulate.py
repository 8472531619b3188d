"""The simulator against tables drawn by hand and against longest paths."""

import random

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.schedule import Schedule
from stagewright.planner.depths import default_depths
from stagewright.planner.schedules import in_flight, make_schedule
from stagewright.planner.simulate import StageTimes, simulate, step_time

from .drawing import drawn
from .longest_path import longest_path

ANY_REPLICAS = ("gpipe", "1f1b", "forward_only")
SEVERAL = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
NAMES = (*ANY_REPLICAS, *SEVERAL, "zero_bubble", "zbv")


def test_gpipe_drawn_by_hand():
    timeline = simulate(make_schedule("gpipe", 2, 3), StageTimes([1, 1], [2, 2]))
    assert drawn(timeline) == [
        "F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2",
        ".. F0 F1 F2 B0 B0 B1 B1 B2 B2 .. ..",
    ]
    assert timeline.bubble_fraction == pytest.approx(6 / 24)


def test_1f1b_drawn_by_hand():
    timeline = simulate(make_schedule("1f1b", 3, 4), StageTimes([1, 1, 1], [2, 2, 2]))
    assert drawn(timeline) == [
        "F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3",
        ".. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..",
        ".. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..",
    ]


def test_messages_travel_beside_the_computation_one_after_the_other():
    times = StageTimes([1, 1], [1, 1], send_forward_s=[2], send_backward_s=[1])
    timeline = simulate(make_schedule("gpipe", 2, 2), times)
    assert drawn(timeline) == [
        "F0 F1 .. .. .. .. .. .. B0 B1",
        ".. .. .. F0 .. F1 B0 B1 .. ..",
    ]
    sends = [event for event in timeline.events if event.kind == "send_forward"]
    assert [(event.start_s, event.end_s) for event in sends] == [(1, 3), (3, 5)]


def test_the_step_ends_when_tied_gradients_are_summed():
    times = StageTimes([1, 1], [1, 1], tied_sync_s=3)
    timeline = simulate(make_schedule("1f1b", 2, 1), times)
    assert timeline.step_time_s == 4 + 3
    reduces = [event for event in timeline.events if event.kind == "reduce"]
    assert [(event.rank, event.start_s, event.end_s) for event in reduces] == [(0, 4, 7), (1, 4, 7)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_peak_activations_are_what_is_in_flight(name):
    for num_stages in range(1, 5):
        saved = [10 * (stage + 1) for stage in range(num_stages)]
        times = StageTimes([1.0] * num_stages, [1.0] * num_stages, saved_bytes=saved)
        timeline = simulate(make_schedule(name, num_stages, 6), times)
        assert timeline.peak_activation_bytes == tuple(
            size * in_flight(name, stage, num_stages, 6) for stage, size in enumerate(saved)
        )


def test_a_forward_only_schedule_keeps_nothing():
    times = StageTimes([1, 2], [0, 0], saved_bytes=[5, 5])
    timeline = simulate(make_schedule("forward_only", 2, 3), times)
    assert timeline.step_time_s == 1 + 3 * 2
    assert timeline.peak_activation_bytes == (0, 0)


def test_a_step_of_no_length_has_no_bubble():
    timeline = simulate(make_schedule("1f1b", 2, 2), StageTimes([0, 0], [0, 0]))
    assert (timeline.step_time_s, timeline.bubble_fraction) == (0, 0)


def random_pipeline(seed):
    """A schedule's name, durations and the rest of what it takes."""
    draw = random.Random(seed)
    name = draw.choice(NAMES)
    chunks = 2 if name == "zbv" else draw.choice([1, 2, 3]) if name in SEVERAL else 1
    positions = draw.randrange(1, 5 if chunks == 1 else 4)
    if name in ANY_REPLICAS:
        replicas = [draw.choice([1, 1, 2, 3]) for _ in range(positions)]
    else:
        replicas = [draw.choice([1, 1, 2])] * positions * chunks
    stages = len(replicas)
    num_microbatches = draw.randrange(1, 10)
    if name in SEVERAL:
        num_microbatches = positions * replicas[0] * draw.randrange(1, 4)
    depths = ()
    if name == "1f1b" and draw.random() < 0.5:
        depths = [
            depth + draw.randrange(stages - stage)
            for stage, depth in enumerate(default_depths(num_microbatches, replicas))
        ]

    def some(count, most=1.0):
        return [draw.random() * most for _ in range(count)]

    times = StageTimes(
        some(stages),
        some(stages, 2),
        draw.choice([[], some(stages - 1)]),
        draw.choice([[], some(stages - 1)]),
        tied_sync_s=draw.choice([0.0, draw.random()]),
        sync_s=draw.choice([[], some(stages, 5)]),
        **draw.choice([{}, {"backward_input_s": some(stages), "backward_weight_s": some(stages)}]),
    )
    return name, times, num_microbatches, replicas, depths, chunks


@pytest.mark.parametrize("seed", range(300))
def test_equals_the_longest_path_on_random_durations(seed):
    name, times, num_microbatches, replicas, depths, chunks = random_pipeline(seed)
    schedule = make_schedule(
        name, len(replicas), num_microbatches, replicas=replicas, depths=depths, chunks=chunks
    )
    timeline = simulate(schedule, times)
    assert timeline.step_time_s == pytest.approx(longest_path(schedule, times), rel=1e-12)
    assert timeline == simulate(schedule, times)
    quick = simulate(schedule, times, with_events=False)
    assert (quick.step_time_s, quick.events) == (timeline.step_time_s, ())
    assert step_time(name, times, num_microbatches, replicas, depths, chunks) == (
        timeline.step_time_s,
        timeline.bubble_fraction,
    )


def test_a_schedule_that_never_finishes_says_who_waits_for_what():
    ranks = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1F0", "1B0", "1B1"))
    schedule = Schedule(name="1f1b", num_microbatches=2, stage_ranks=((0,), (1,)), ranks=ranks)
    with pytest.raises(InvalidInput, match="rank 0 waits for 1B0; rank 1 waits for 0F1"):
        simulate(schedule, StageTimes([1, 1], [1, 1]))


def test_missing_backwards_are_refused():
    ranks = (("0F0", "0F1", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=2, stage_ranks=((0,),), ranks=ranks)
    with pytest.raises(
        InvalidInput, match="1 whole backwards, 0 input and 0 weight parts for 1 stages x 2"
    ):
        simulate(schedule, StageTimes([1], [1]))


def test_recomputation_is_part_of_a_backward():
    ranks = (("0F0", "0R0", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,),), ranks=ranks)
    with pytest.raises(InvalidInput, match="takes no 0R0"):
        simulate(schedule, StageTimes([1], [1]))


def test_durations_must_fit_the_schedule():
    with pytest.raises(InvalidInput, match="backward_s has 1 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1]))
    with pytest.raises(InvalidInput, match="send_forward_s has 2 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1, 1], [1, 1]))


def test_several_stages_on_one_rank_are_played_in_its_order():
    ranks = (("0F0", "1F0", "1B0", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,), (0,)), ranks=ranks)
    assert drawn(simulate(schedule, StageTimes([1, 2], [1, 1]))) == ["F0 F0 F0 B0 B0"]
