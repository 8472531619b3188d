"""Values sent past stages that have no use for them: what the simulator and the planner say."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.plan.plan import DirectSend, PlanOptions
from stagewright.planner.cost.communication import find_skip_values, find_skips
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.durations import SkipTimes
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.planner.simulator.simulate import StageTimes, simulate, step_time
from stagewright.planner.validation.validate import validate
from stagewright.schedules.make_schedule import make_schedule
from tests.planner.branching import random_branches, unet
from tests.planner.drawing import drawn
from tests.planner.longest_path import longest_path
from tests.planner.random_pipelines import random_pipeline


def test_a_message_past_a_stage_drawn_by_hand():
    """From 0 it goes behind the one to 1, for 3; at 5 it is there, before 1's own."""
    times = StageTimes([1, 1, 1], [0, 0, 0], [1, 1], [])
    schedule = make_schedule("forward_only", 3, 2)
    assert drawn(simulate(schedule, times)) == [
        "F0 F1 .. .. .. ..",
        ".. .. F0 F1 .. ..",
        ".. .. .. .. F0 F1",
    ]
    past = replace(times, skips=[SkipTimes(0, 2, forward_s=3)])
    timeline = simulate(schedule, past)
    assert drawn(timeline) == [
        "F0 F1 .. .. .. .. .. .. .. ..",
        ".. .. F0 .. .. .. F1 .. .. ..",
        ".. .. .. .. .. F0 .. .. .. F1",
    ]
    sends = sorted((e.start_s, e.end_s) for e in timeline.events if e.kind == "send_forward")
    assert sends == [(1, 2), (2, 5), (3, 4), (5, 6), (6, 9), (7, 8)]


def test_gradients_come_straight_back_drawn_by_hand():
    """The backward of 0 waits for 2's message, which is longer on its way than 1's."""
    times = StageTimes([1, 1, 1], [1, 1, 1], skips=[SkipTimes(0, 2, backward_s=4)])
    assert drawn(simulate(make_schedule("gpipe", 3, 1), times)) == [
        "F0 .. .. .. .. .. .. .. B0",
        ".. F0 .. .. B0 .. .. .. ..",
        ".. .. F0 B0 .. .. .. .. ..",
    ]


def test_it_waits_for_others_on_a_shared_link():
    times = StageTimes([1, 1, 1], [0, 0, 0], [2, 2], forward_channel=[5, 5])
    schedule = make_schedule("forward_only", 3, 1)
    assert simulate(schedule, times).step_time_s == 7
    past = replace(times, skips=[SkipTimes(0, 2, forward_s=2, forward_channel=5)])
    assert drawn(simulate(schedule, past)) == [
        "F0 .. .. .. .. .. .. ..",
        ".. .. .. F0 .. .. .. ..",
        ".. .. .. .. .. .. .. F0",
    ]


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_longest_path_with_skips(seed):
    draw = random.Random(seed)
    name, times, num_microbatches, replicas, depths, chunks = random_pipeline(seed)
    stages = len(replicas)
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages) if draw.random() < 0.5]
    shared = [-1, 0, 1] if seed % 2 else [-1]
    times = replace(
        times,
        skips=[
            SkipTimes(*pair, draw.random(), draw.random(), draw.choice(shared), draw.choice(shared))
            for pair in pairs
        ],
        forward_channel=[draw.choice(shared) for _ in times.send_forward_s],
        backward_channel=[draw.choice(shared) for _ in times.send_backward_s],
    )
    schedule = make_schedule(
        name, stages, num_microbatches, replicas=replicas, depths=depths, chunks=chunks
    )
    found = simulate(schedule, times).step_time_s
    assert found == pytest.approx(longest_path(schedule, times), rel=1e-12)
    assert step_time(name, times, num_microbatches, replicas, depths, chunks)[0] == found


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (0, 3), (-1, 2)])
def test_a_message_that_passes_by_no_stage_is_refused(source, target):
    times = StageTimes([1, 1, 1], [1, 1, 1], skips=[SkipTimes(source, target)])
    with pytest.raises(InvalidInput, match=f"from {source} to {target} of 3 stages"):
        simulate(make_schedule("gpipe", 3, 1), times)


def test_values_go_from_reader_to_reader():
    """t0 is read by layers 1 and 6 of a U-Net of 7, t1 by 2 and 5, t2 by 3 and 4."""
    values = find_skip_values(unet(3))
    assert {value.name: value.layers for value in values} == {
        "t0": (0, 1, 6),
        "t1": (1, 2, 5),
        "t2": (2, 3, 4),
    }
    seven = find_skips(values, range(8))
    assert [(skip.source, skip.target, skip.values[0].name) for skip in seven] == [
        (1, 6, "t0"),
        (2, 5, "t1"),
    ]
    three = find_skips(values, (0, 2, 5, 7))
    assert [(skip.source, skip.target, skip.values[0].name) for skip in three] == [(0, 2, "t0")]
    assert find_skips(values, (0, 4, 7)) == ()


SLOW = LinkLevel(group_size=2, bandwidth_bytes_per_s=4e6, latency_s=1e-4)


def flat(count, *, shared=False):
    link = SLOW.model_copy(update={"group_size": count, "shared": shared})
    devices = tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(count))
    return Cluster(devices=devices, levels=(link,))


def two_levels(count):
    inner = SLOW.model_copy(update={"bandwidth_bytes_per_s": 4e7})
    outer = SLOW.model_copy(update={"group_size": count, "shared": True})
    devices = tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(count))
    return Cluster(devices=devices, levels=(inner, outer))


def test_a_plan_lists_what_goes_past_stages_and_is_shorter():
    profile, options = unet(3), PlanOptions(num_stages=7, num_microbatches=8, skips="direct")
    relayed = plan(profile, flat(7), options.model_copy(update={"skips": "relay"}))
    made = plan(profile, flat(7), options)
    validate(made, profile, flat(7))
    assert [(send.source, send.target, send.tensors) for send in made.direct_sends] == [
        (1, 6, ("t0",)),
        (2, 5, ("t1",)),
    ]
    first = made.direct_sends[0]
    assert (first.forward_bytes, first.backward_bytes) == (4096, 4096)
    assert first.forward_time_s == pytest.approx(1e-4 + 4096 / 4e6)
    assert made.step_time_s < relayed.step_time_s
    assert plan_timeline(made).step_time_s == pytest.approx(made.step_time_s, rel=1e-12)
    assert "values go past stages" in " ".join(made.notes)
    assert "direct sends: 1 to 6 8.0 KiB, 2 to 5 4.0 KiB" in str(made)
    assert relayed.direct_sends == ()
    # Stage 3 has no use for either: neither sent nor held there.
    ours, theirs = made.stages[3], relayed.stages[3]
    assert theirs.send_forward_bytes - ours.send_forward_bytes == 4096 + 2048
    held = theirs.memory.receive_buffers_bytes - ours.memory.receive_buffers_bytes
    assert held == 2 * 2 * (4096 + 2048)


SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1,
    "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("make_cluster", [flat, two_levels])
def test_never_slower_than_relays(name, make_cluster):
    cluster = make_cluster(4)
    for seed in range(3):
        draw = random.Random(seed)
        profile = random_branches(seed, draw.randrange(6, 9)) if seed else unet(4)
        asked = PlanOptions(
            schedule=name,
            num_microbatches=draw.choice([4, 8]),
            num_stages=None if seed else 4 * SCHEDULES[name],
            recompute=draw.choice(["never", "auto", "always"]) if seed else "never",
            max_replicas=2 if seed else 1,
        )
        relayed = plan(profile, cluster, asked)
        made = plan(profile, cluster, asked.model_copy(update={"skips": "direct"}))
        validate(made, profile, cluster)
        assert made.step_time_s <= relayed.step_time_s
        if seed == 0:
            assert made.step_time_s < 0.999 * relayed.step_time_s
            assert made.direct_sends


def test_a_search_by_the_faster_way_alone_would_end_worse():
    """Small changes to other plans than with relays: by 3.6 % none became as fast."""
    profile, cluster = random_branches(11, 9), two_levels(6)
    asked = PlanOptions(num_microbatches=4)
    relayed = plan(profile, cluster, asked)
    made = plan(profile, cluster, asked.model_copy(update={"skips": "direct"}))
    validate(made, profile, cluster)
    assert made.step_time_s <= relayed.step_time_s


def written_again(made, **changes):
    first, *others = made.direct_sends
    return made.model_copy(update={"direct_sends": (first.model_copy(update=changes), *others)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"forward_bytes": 4097}, "from stage 1 to 6"),
        ({"tensors": ("t9",)}, "from stage 1 to 6"),
        ({"source": 0}, "from stage 0 to 6"),
        ({"backward_time_s": 1.0}, "backward_time_s is 1.0"),
        ({"forward_channel": 3}, "forward_channel is"),
    ],
)
def test_wrong_numbers_are_found(change, told):
    profile, options = unet(3), PlanOptions(num_stages=7, skips="direct")
    made = plan(profile, flat(7), options)
    with pytest.raises(PlanMismatch, match=told):
        validate(written_again(made, **change), profile, flat(7))


def test_a_plan_that_takes_the_slower_way_is_found():
    profile, options = unet(3), PlanOptions(num_stages=7)
    relayed = plan(profile, flat(7), options)
    allowed = options.model_copy(update={"skips": "direct"})
    with pytest.raises(PlanMismatch, match="with relays or direct sends"):
        validate(relayed.model_copy(update={"options": allowed}), profile, flat(7))
    made = plan(profile, flat(7), allowed)
    with pytest.raises(PlanMismatch, match="direct sends despite skips='relay'"):
        validate(made.model_copy(update={"options": options}), profile, flat(7))


def test_a_shared_link_has_its_number():
    profile, cluster = unet(2), flat(5, shared=True)
    made = plan_from_balance(profile, cluster, PlanOptions(skips="direct"), [1] * 5)
    validate(made, profile, cluster)
    (send,) = made.direct_sends
    assert send.forward_channel == made.forward_channels[send.source]
    assert send.backward_channel == made.backward_channels[send.target - 1]


def test_who_reads_what_has_to_be_known():
    profile = unet(3)
    unknown = profile.model_copy(update={"edges": ()})
    wrong = profile.model_copy(update={"edges": profile.edges[:-1]})
    options = PlanOptions(num_stages=7, skips="direct")
    for other in (unknown, wrong):
        assert find_skip_values(other) is None
        made = plan(other, flat(7), options)
        validate(made, other, flat(7))
        assert made.direct_sends == ()
        assert "does not know which layer reads what" in " ".join(made.notes)


def test_reordered_layers_are_relayed():
    profile = unet(2)
    options = PlanOptions(layer_order="any", num_stages=4, skips="direct")
    made = plan(profile, flat(4), options)
    validate(made, profile, flat(4))
    assert made.layer_order == () or made.direct_sends == ()


def test_stages_of_one_device_hand_over_without_a_message():
    """Of six stages dealt in rounds to three devices, 1 and 4 are on one."""
    options = PlanOptions(schedule="interleaved_1f1b", num_microbatches=6, skips="direct")
    profile = unet(3)
    made = plan_from_balance(profile, flat(3), options, [2, 1, 1, 1, 1, 1])
    validate(made, profile, flat(3))
    sends = {(send.source, send.target): send for send in made.direct_sends}
    assert sends[0, 5].forward_bytes == 4096
    assert (sends[1, 4].tensors, sends[1, 4].forward_bytes) == (("t1",), 0)
    assert sends[1, 4].forward_time_s == sends[1, 4].backward_time_s == 0


def test_documents_without_a_stage_between_are_refused():
    made = plan(unet(3), flat(7), PlanOptions(num_stages=7, skips="direct"))
    neighbour = DirectSend(source=1, target=2, tensors=("t0",))
    with pytest.raises(ValueError, match="must skip at least one"):
        type(made).model_validate({**dict(made), "direct_sends": (neighbour,)})


def test_bytes_over_every_cut_are_those_of_the_boundary():
    """What is sent over a cut and past it together is what is live there."""
    for seed in range(20):
        profile = random_branches(seed, 8)
        made = plan_from_balance(profile, flat(8), PlanOptions(skips="direct"), [1] * 8)
        if not made.direct_sends:
            continue
        for cut, (front, back) in enumerate(pairwise(made.stages)):
            over = [s for s in made.direct_sends if s.source <= cut < s.target]
            assert front.send_forward_bytes + sum(s.forward_bytes for s in over) == (
                made.boundaries[cut].forward_bytes
            )
            assert back.send_backward_bytes + sum(s.backward_bytes for s in over) == (
                made.boundaries[cut].backward_bytes
            )
