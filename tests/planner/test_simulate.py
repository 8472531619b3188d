"""The simulator against tables drawn by hand and against longest paths."""

import random
from itertools import pairwise

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.schedule import Schedule
from stagewright.planner.schedules import in_flight, make_schedule
from stagewright.planner.simulate import StageTimes, simulate

from .drawing import drawn


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


def test_messages_travel_beside_the_computation():
    times = StageTimes([1, 1], [1, 1], send_forward_s=[2], send_backward_s=[1])
    timeline = simulate(make_schedule("gpipe", 2, 2), times)
    assert drawn(timeline) == [
        "F0 F1 .. .. .. .. .. B0 B1",
        ".. .. .. F0 F1 B0 B1 .. ..",
    ]
    sends = [event for event in timeline.events if event.kind == "send_forward"]
    assert [(event.start_s, event.end_s) for event in sends] == [(1, 3), (2, 4)]


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


def longest_path(schedule, times):
    """The step time by pushing starts along every dependency until nothing moves."""
    duration = {"F": times.forward_s, "B": times.backward_s}
    edges = []
    for actions in schedule.ranks:
        nodes = [(action.stage, action.work.value, action.microbatch) for action in actions]
        edges += [(before, after, 0.0) for before, after in pairwise(nodes)]
        for stage, work, index in nodes:
            node = (stage, work, index)
            if work == "F":
                edges.append((node, (stage, "B", index), 0.0))
                if stage + 1 < schedule.num_stages:
                    edges.append((node, (stage + 1, "F", index), times.send_forward_s[stage]))
            elif stage > 0:
                edges.append((node, (stage - 1, "B", index), times.send_backward_s[stage - 1]))
    starts = dict.fromkeys([node for edge in edges for node in edge[:2]], 0.0)
    moved = True
    while moved:
        moved = False
        for before, after, delay_s in edges:
            at_s = starts[before] + duration[before[1]][before[0]] + delay_s
            if at_s > starts[after]:
                starts[after], moved = at_s, True
    return max(start_s + duration[work][stage] for (stage, work, _), start_s in starts.items())


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_longest_path_on_random_durations(seed):
    draw = random.Random(seed)
    num_stages, num_microbatches = draw.randrange(1, 6), draw.randrange(1, 9)
    times = StageTimes(
        [draw.random() for _ in range(num_stages)],
        [draw.random() * 2 for _ in range(num_stages)],
        [draw.random() for _ in range(num_stages - 1)],
        [draw.random() for _ in range(num_stages - 1)],
    )
    schedule = make_schedule(draw.choice(["gpipe", "1f1b"]), num_stages, num_microbatches)
    timeline = simulate(schedule, times)
    assert timeline.step_time_s == pytest.approx(longest_path(schedule, times), rel=1e-12)
    assert timeline == simulate(schedule, times)
    quick = simulate(schedule, times, with_events=False)
    assert (quick.step_time_s, quick.events) == (timeline.step_time_s, ())


def test_a_schedule_that_never_finishes_says_who_waits_for_what():
    ranks = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1F0", "1B0", "1B1"))
    schedule = Schedule(name="1f1b", num_microbatches=2, stage_rank=(0, 1), ranks=ranks)
    with pytest.raises(InvalidInput, match="rank 1 waits for 0F1; rank 0 waits for 1B0"):
        simulate(schedule, StageTimes([1, 1], [1, 1]))


def test_missing_backwards_are_refused():
    ranks = (("0F0", "0F1", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=2, stage_rank=(0,), ranks=ranks)
    with pytest.raises(InvalidInput, match="1 backwards for 1 stages x 2"):
        simulate(schedule, StageTimes([1], [1]))


def test_split_backwards_are_refused():
    ranks = (("0F0", "0I0", "0W0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_rank=(0,), ranks=ranks)
    with pytest.raises(InvalidInput, match="not 0I0"):
        simulate(schedule, StageTimes([1], [1]))


def test_durations_must_fit_the_schedule():
    with pytest.raises(InvalidInput, match="backward_s has 1 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1]))
    with pytest.raises(InvalidInput, match="send_forward_s has 2 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1, 1], [1, 1]))


def test_several_stages_on_one_rank_are_played_in_its_order():
    ranks = (("0F0", "1F0", "1B0", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_rank=(0, 0), ranks=ranks)
    assert drawn(simulate(schedule, StageTimes([1, 2], [1, 1]))) == ["F0 F0 F0 B0 B0"]
