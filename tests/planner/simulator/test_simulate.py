"""The simulator against tables drawn by hand and against longest paths."""

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.schedule import Schedule
from stagewright.planner.simulator.event_loop import simulate_step
from stagewright.planner.simulator.simulate import StageTimes, simulate, step_time
from stagewright.schedules.action_order import make_order
from stagewright.schedules.make_schedule import in_flight, make_schedule
from tests.planner.drawing import drawn
from tests.planner.longest_path import longest_path
from tests.planner.random_pipelines import random_pipeline


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


@pytest.mark.parametrize("seed", range(80))
def test_compiled_and_plain_give_the_same_bits(seed, monkeypatch):
    pytest.importorskip("numba")
    name, times, *rest = random_pipeline(seed)
    boundaries = times.num_stages - 1
    if seed % 2:
        times = replace(times, forward_channel=[0] * boundaries, send_forward_s=[0.3] * boundaries)
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("STAGEWRIGHT_NUMBA", setting)
        order = make_order(name, *rest)
        step = simulate_step(order, times)
        arrays = (order.first, order.stage, order.work, order.microbatch, step.start_s,
                  step.end_s, step.sent_s, step.done_s)  # fmt: skip
        results.append([array.tobytes() for array in arrays] + [step.step_time_s])
    assert results[0] == results[1]


def test_nothing_small_imports_numba():
    code = """
import sys
from stagewright.planner.simulator.simulate import StageTimes, step_time
step_time("1f1b", StageTimes([1] * 8, [2] * 8), 64)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("seed", range(120))
def test_no_step_ends_before_its_lower_bound(seed):
    """Of every stage: reach it, work through all it is dealt, go back or sum its gradients."""
    name, times, num_microbatches, replicas, depths, _ = random_pipeline(seed, ("gpipe", "1f1b"))
    end_s, _ = step_time(name, times, num_microbatches, replicas, depths)
    stages = range(len(replicas))
    there_s, back_s = (
        list(sends) or [0.0] * (len(replicas) - 1)
        for sends in (times.send_forward_s, times.send_backward_s)
    )
    for stage in stages:
        work_s = times.forward_s[stage] + times.backward_s[stage]
        bound_s = sum(times.forward_s[:stage]) + sum(there_s[:stage])
        bound_s += -(-num_microbatches // replicas[stage]) * work_s
        sync_s = times.sync_s[stage] if len(times.sync_s) else 0.0
        bound_s += max(sync_s, sum(times.backward_s[:stage]) + sum(back_s[:stage]))
        assert end_s >= bound_s * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(120))
def test_no_split_step_ends_before_its_lower_bound(seed):
    """Only input parts run all the way back; weight parts fill in."""
    name, times, num_microbatches, replicas, *_ = random_pipeline(seed, ("zero_bubble",))
    end_s, _ = step_time(name, times, num_microbatches, replicas)
    dealt = -(-num_microbatches // replicas[0])
    forwards, _, inputs, weights, _ = np.split(times.work_s, 5)
    for stage in range(len(replicas)):
        there_s, own_s = sum(forwards[:stage]), dealt * (forwards[stage] + inputs[stage])
        sync_s = times.sync_s[stage] if len(times.sync_s) else 0.0
        summed_s = there_s + own_s + dealt * weights[stage] + sync_s
        back_s = there_s + own_s + sum(inputs[:stage])
        assert end_s >= max(summed_s, back_s) * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_memory_over_time_ends_empty_and_peaks_where_it_says(seed):
    draw = random.Random(seed)
    name, times, num_microbatches, replicas, depths, chunks = random_pipeline(seed)
    times = replace(
        times,
        saved_bytes=[draw.randrange(1, 100) for _ in replicas],
        recomputed_bytes=draw.choice([[], [draw.choice([0, 50]) for _ in replicas]]),
    )
    schedule = make_schedule(
        name, len(replicas), num_microbatches, replicas=replicas, depths=depths, chunks=chunks
    )
    timeline = simulate(schedule, times)
    assert simulate(schedule, times, with_events=False).memory == ()
    for rank, peak in enumerate(timeline.peak_activation_bytes):
        changes = [held for held in timeline.memory if held.rank == rank]
        assert [held.time_s for held in changes] == sorted(held.time_s for held in changes)
        assert max((held.held_bytes for held in changes), default=0) == peak
        assert not changes or changes[-1].held_bytes == 0


def test_memory_over_time_by_hand():
    times = StageTimes([1, 1], [2, 2], saved_bytes=[10, 3])
    timeline = simulate(make_schedule("1f1b", 2, 2), times)
    assert [(held.rank, held.time_s, held.held_bytes) for held in timeline.memory] == [
        (0, 0, 10), (0, 1, 20), (0, 6, 10), (0, 9, 0),
        (1, 1, 3), (1, 4, 0), (1, 4, 3), (1, 7, 0),
    ]  # fmt: skip
    assert timeline.peak_activation_bytes == (20, 3)


def test_a_stage_that_recomputes_holds_its_inputs_and_all_of_one_microbatch_at_work():
    times = StageTimes([1], [2], saved_bytes=[1], recomputed_bytes=[100])
    timeline = simulate(make_schedule("gpipe", 1, 2), times)
    assert [(held.time_s, held.held_bytes) for held in timeline.memory] == [
        (0, 1), (1, 2), (2, 102), (4, 1), (4, 101), (6, 0),
    ]  # fmt: skip
    assert timeline.peak_activation_bytes == (102,)


def test_activations_stay_until_the_weight_part():
    times = StageTimes([1, 1], [2, 2], saved_bytes=[10, 10])
    timeline = simulate(make_schedule("zero_bubble", 2, 3), times)
    assert timeline.peak_activation_bytes == (20, 20)
    assert [held.time_s for held in timeline.memory if held.rank == 1] == [1, 3, 6, 6, 9, 10]


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


def test_recomputation_is_the_first_part_of_a_backward():
    """It waits for the gradient too, so the step is as long as if it were not shown apart."""
    ranks = (("0F0", "0R0", "0B0"), ("1F0", "1B0"))
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,), (1,)), ranks=ranks)
    times = StageTimes([1, 1], [3, 2], recompute_s=[1, 0])
    assert drawn(simulate(schedule, times)) == ["F0 .. .. .. R0 B0 B0", ".. F0 B0 B0 .. .. .."]
    whole = simulate(make_schedule("1f1b", 2, 1), replace(times, recompute_s=()))
    timeline = simulate(schedule, times)
    assert timeline.step_time_s == whole.step_time_s
    assert timeline.bubble_fraction == whole.bubble_fraction


def test_a_backward_that_recomputes_nothing_is_shorter_and_its_microbatch_kept_whole():
    ranks = (("0F0", "0F1", "0R0", "0B0", "0B1"),)
    schedule = Schedule(name="gpipe", num_microbatches=2, stage_ranks=((0,),), ranks=ranks)
    times = StageTimes([1], [3], recompute_s=[1], saved_bytes=[1], recomputed_bytes=[100])
    timeline = simulate(schedule, times)
    assert drawn(timeline) == ["F0 F1 R0 B0 B0 B1 B1"]
    assert [(held.time_s, held.held_bytes) for held in timeline.memory] == [
        (0, 1), (1, 102), (2, 202), (5, 101), (7, 0),
    ]  # fmt: skip


def test_recomputation_without_a_backward_is_refused():
    ranks = (("0F0", "0R0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,),), ranks=ranks)
    with pytest.raises(InvalidInput, match="0 whole backwards, 0 input and 0 weight parts"):
        simulate(schedule, StageTimes([1], [1]))


def test_of_mixed_backwards_the_right_part_is_waited_for():
    ranks = (("0F0", "0F1", "0B1", "0B0"), ("1F0", "1B0", "1F1", "1I1", "1W1"))
    made = Schedule(name="1f1b", num_microbatches=2, stage_ranks=((0,), (1,)), ranks=ranks)
    assert simulate(made, StageTimes([1, 1], [2, 2])).step_time_s == 10
    ranks = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1I1", "1W1", "1B0"))
    stuck = Schedule(name="1f1b", num_microbatches=2, stage_ranks=((0,), (1,)), ranks=ranks)
    with pytest.raises(InvalidInput, match="rank 0 waits for 1B0; rank 1 waits for 0F1"):
        simulate(stuck, StageTimes([1, 1], [1, 1]))


def test_durations_must_fit_the_schedule():
    with pytest.raises(InvalidInput, match="backward_s has 1 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1]))
    with pytest.raises(InvalidInput, match="send_forward_s has 2 entries for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), StageTimes([1, 1], [1, 1], [1, 1]))


def test_several_stages_on_one_rank_are_played_in_its_order():
    ranks = (("0F0", "1F0", "1B0", "0B0"),)
    schedule = Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,), (0,)), ranks=ranks)
    assert drawn(simulate(schedule, StageTimes([1, 2], [1, 1]))) == ["F0 F0 F0 B0 B0"]
