"""Messages of several boundaries on one link."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from stagewright.planner.simulator.simulate import StageTimes, simulate, step_time
from stagewright.schedules.make_schedule import make_schedule
from tests.planner.drawing import drawn
from tests.planner.instances import wide_instance
from tests.planner.longest_path import longest_path
from tests.planner.oracle import usable_plans
from tests.planner.random_pipelines import ANY_REPLICAS, random_pipeline


def test_two_boundaries_on_one_link_drawn_by_hand():
    """At 4 the second boundary's first message waits until the first's second is through."""
    times = StageTimes([1, 1, 1], [0, 0, 0], [2, 2], [2, 2])
    schedule = make_schedule("forward_only", 3, 2)
    assert drawn(simulate(schedule, times)) == [
        "F0 F1 .. .. .. .. .. .. ..",
        ".. .. .. F0 .. F1 .. .. ..",
        ".. .. .. .. .. .. F0 .. F1",
    ]
    shared = simulate(schedule, replace(times, forward_channel=[7, 7]))
    assert drawn(shared) == [
        "F0 F1 .. .. .. .. .. .. .. ..",
        ".. .. .. F0 .. F1 .. .. .. ..",
        ".. .. .. .. .. .. .. F0 .. F1",
    ]
    sends = sorted((event.start_s, event.end_s) for event in shared.events if event.kind[0] == "s")
    assert sends == [(1, 3), (3, 5), (5, 7), (7, 9)]


def test_both_directions_on_one_link_drawn_by_hand():
    times = StageTimes([1, 1], [1, 1], [2], [2])
    schedule = make_schedule("1f1b", 2, 3, depths=(3, 1))
    assert drawn(simulate(schedule, times)) == [
        "F0 F1 F2 .. .. .. .. B0 .. B1 .. B2",
        ".. .. .. F0 B0 F1 B1 F2 B2 .. .. ..",
    ]
    half_duplex = replace(times, forward_channel=[0], backward_channel=[0])
    assert drawn(simulate(schedule, half_duplex)) == [
        "F0 F1 F2 .. .. .. .. .. .. B0 .. B1 .. B2",
        ".. .. .. F0 B0 F1 B1 F2 B2 .. .. .. .. ..",
    ]


def test_of_messages_made_at_once_the_lowest_ranks_goes_first():
    times = StageTimes([1, 1], [0, 0], [2], [], forward_channel=[0])
    assert drawn(simulate(make_schedule("forward_only", 2, 2, replicas=(2, 1)), times)) == [
        "F0 .. .. .. .. ..",
        "F1 .. .. .. .. ..",
        ".. .. .. F0 .. F1",
    ]


def shared_by(draw, times, most):
    """Both directions of every boundary on one of few links."""
    boundaries = len(times.forward_s) - 1
    return replace(
        times,
        send_forward_s=[draw.random() for _ in range(boundaries)],
        send_backward_s=[draw.random() for _ in range(boundaries)],
        forward_channel=[draw.randrange(most) for _ in range(boundaries)],
        backward_channel=[draw.randrange(most) for _ in range(boundaries)],
    )


def made_and_messages(timeline):
    """When each message was ready, and when it went, by its action."""
    ready, went = {}, {}
    for event in timeline.events:
        if event.kind in ("F", "B", "I"):
            ready["F" if event.kind == "F" else "B", event.stage, event.microbatch] = event
        elif event.kind in ("send_forward", "send_backward"):
            kind = "F" if event.kind == "send_forward" else "B"
            went[kind, event.stage, event.microbatch] = event
    return ready, went


@pytest.mark.parametrize("seed", range(60))
def test_messages_on_a_link_go_one_by_one_in_the_order_they_were_made(seed):
    draw = random.Random(seed)
    name, times, num_microbatches, replicas, depths, chunks = random_pipeline(seed)
    times = shared_by(draw, times, 3)
    schedule = make_schedule(
        name, len(replicas), num_microbatches, replicas=replicas, depths=depths, chunks=chunks
    )
    ready, went = made_and_messages(simulate(schedule, times))
    queues = {}
    for key, event in went.items():
        kind, stage, _ = key
        channel = times.forward_channel[stage] if kind == "F" else times.backward_channel[stage - 1]
        queues.setdefault(channel, []).append((ready[key].end_s, event.rank, event))
    for queue in queues.values():
        free_s = 0.0
        for ready_s, _, event in sorted(queue, key=lambda entry: entry[:2]):
            assert event.start_s == max(free_s, ready_s)
            free_s = event.end_s
    for kind, stage, index in ready:
        before = stage - 1 if kind == "F" else stage + 1
        if (kind, before, index) in went:
            assert ready[kind, stage, index].start_s >= went[kind, before, index].end_s


@pytest.mark.parametrize("seed", range(60))
def test_steps_on_shared_links_are_longest_paths_with_messages_in_order(seed):
    name, times, num_microbatches, replicas, depths, chunks = random_pipeline(seed)
    times = shared_by(random.Random(seed), times, 3)
    given = {"replicas": replicas, "depths": depths, "chunks": chunks}
    schedule = make_schedule(name, len(replicas), num_microbatches, **given)
    found_s = step_time(name, times, num_microbatches, replicas, depths, chunks)[0]
    assert found_s == pytest.approx(longest_path(schedule, times), rel=1e-12)


def test_splits_on_shared_links_take_as_long_as_counted_apart():
    """Channels from `recount`, the step as a longest path: nothing of the planner's own."""
    slowed = 0
    for seed in range(25):
        problem = wide_instance(seed, num_microbatches=6, max_replicas=2, schedule="1f1b")
        levels = tuple(
            level.model_copy(update={"shared": True}) for level in problem.cluster.levels
        )
        problem = replace(problem, cluster=problem.cluster.model_copy(update={"levels": levels}))
        for split in islice(usable_plans(problem), 0, 160, 16):
            alone, schedule = times_of(split), schedule_of(split)
            forward, backward = split.channels()
            times = replace(alone, forward_channel=forward, backward_channel=backward)
            step_s = longest_path(schedule, times)
            assert split.step_time_s() == pytest.approx(step_s, rel=1e-12), seed
            slowed += step_s > longest_path(schedule, alone) * (1 + 1e-9)
    assert slowed > 4


def times_of(split):
    """Of a split, every link its own."""
    stages = range(split.num_stages)
    return StageTimes(
        forward_s=[split.work_s(stage)[0] for stage in stages],
        backward_s=[split.work_s(stage)[1] for stage in stages],
        send_forward_s=[split.send_forward(stage)[1] for stage in stages[:-1]],
        send_backward_s=[split.send_backward(stage)[1] for stage in stages[1:]],
        sync_s=[split.sync_s(stage) for stage in stages],
        tied_sync_s=split.tied_sync_s(),
    )


def schedule_of(split):
    stages, options = range(split.num_stages), split.options
    return make_schedule(
        options.schedule,
        split.num_stages,
        options.num_microbatches,
        replicas=[split.replicas(stage) for stage in stages],
        depths=[split.depth(stage) for stage in stages] if options.schedule == "1f1b" else (),
    )


@pytest.mark.parametrize("seed", range(60))
def test_sharing_a_link_never_makes_a_step_shorter(seed):
    name, times, *rest = random_pipeline(seed)
    shared = shared_by(random.Random(seed), times, 1)
    alone = replace(shared, forward_channel=(), backward_channel=())
    assert step_time(name, shared, *rest)[0] >= step_time(name, alone, *rest)[0]


@pytest.mark.parametrize("seed", range(60))
def test_a_link_for_every_boundary_is_as_good_as_links_of_their_own(seed):
    """Played in order of time the one way, rank by rank the other."""
    name, times, num_microbatches, replicas, depths, _ = random_pipeline(seed, ANY_REPLICAS)
    boundaries = len(replicas) - 1
    shared = replace(
        times,
        forward_channel=range(boundaries),
        backward_channel=range(boundaries, 2 * boundaries),
    )
    schedule = make_schedule(name, len(replicas), num_microbatches, depths=min_depths(depths))
    assert simulate(schedule, shared) == simulate(schedule, times)


def min_depths(depths):
    """Depths for one rank a stage: never growing."""
    least, out = 10**6, []
    for depth in depths:
        least = min(least, depth)
        out.append(least)
    return out
