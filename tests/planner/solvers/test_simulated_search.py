"""Schedules without a closed form: every request has a valid plan or a clear refusal."""

import random
import time
from itertools import combinations

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.cost import plan_cost as price
from stagewright.planner.cost.assignment import Assignment, place_stages
from stagewright.planner.cost.chain import chain_costs, legal_positions
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.cost.plan_cost import CostModel
from stagewright.planner.plan import plan
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers import simulated_search as several
from stagewright.planner.solvers.device_layouts import list_device_layouts
from stagewright.planner.solvers.tournament import Tournament
from stagewright.planner.validation.reference_cost import ReferenceSplit
from stagewright.planner.validation.validate import validate
from stagewright.schedules.make_schedule import in_flight
from stagewright.schedules.traits import FOLDED, SPLIT_BACKWARD
from tests.builders import chain_profile, random_profile, two_level_cluster

ONE_STAGE = ["zero_bubble"]
CHUNKED = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
CHUNKS = {"zero_bubble": 1, "zbv": 2, "dualpipev": 2}
"""Of schedules that take no others."""
SCHEDULES = ONE_STAGE + CHUNKED

PROFILES = {
    "even": chain_profile([1e-3] * 12, forward_bytes=100, parameter_bytes=400, saved_bytes=100),
    "uneven": random_profile(3, 10),
    "short": chain_profile([1e-3, 3e-3]),
}


def mixed(fast=2, slow=4, *, speed=2.0):
    """Two kinds of devices in one network, the fast ones in front."""
    devices = [Device(name=f"fast:{index}", kind="fast", speed=speed) for index in range(fast)] + [
        Device(name=f"slow:{index}", kind="slow") for index in range(slow)
    ]
    level = LinkLevel(group_size=fast + slow, latency_s=1e-5, bandwidth_bytes_per_s=1e7)
    return Cluster(devices=tuple(devices), levels=(level,))


def limited(cluster, memory_bytes):
    devices = tuple(
        device.model_copy(update={"memory_bytes": memory_bytes}) for device in cluster.devices
    )
    return cluster.model_copy(update={"devices": devices})


CLUSTERS = {
    "flat": Cluster.uniform(4, bandwidth_bytes_per_s=1e7),
    "tight": Cluster.uniform(4, memory_bytes=12_000, bandwidth_bytes_per_s=1e7),
    "kinds": mixed(),
    "one of each": mixed(1, 1),
    "nodes": two_level_cluster(5),
}


def planned(profile, cluster, **asked):
    """A plan that holds."""
    made = plan(profile, cluster, PlanOptions(**asked))
    validate(made, profile, cluster)
    return made


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_request_has_a_valid_plan_or_a_clear_refusal(schedule, cluster):
    draw = random.Random(f"{schedule} {cluster}")
    plans, refused = 0, []
    for profile in PROFILES.values():
        for num_microbatches in (1, 4, 7, 32):
            chunks = CHUNKS.get(schedule, draw.choice([1, 2, 3]))
            asked = {
                "num_microbatches": num_microbatches,
                "num_stages": draw.choice([None, None, chunks, 2 * chunks, 3 * chunks]),
                "max_replicas": draw.choice([1, 2, None]),
                "recompute": draw.choice(["never", "auto", "always"]),
            }
            if schedule not in CHUNKS:
                asked["chunks"] = chunks
            try:
                planned(profile, CLUSTERS[cluster], schedule=schedule, **asked)
                plans += 1
            except Infeasible as error:
                refused.append(error)
    assert plans >= (1 if cluster == "tight" else 3)
    for error in refused:
        assert error.constraint in ("memory", "devices", "legal_cuts", "schedule")
        assert (error.required is None) == ("rounds" in str(error))


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("num_microbatches", [127, 128])
def test_numbers_that_do_not_divide_into_rounds_are_passed_over(schedule, num_microbatches):
    """They used to end the whole search: 'cannot be divided into 42 rounds over 3 ranks'."""
    profile = chain_profile([1e-3] * 16)
    for devices in (3, 4, 5, 6):
        cluster = Cluster.uniform(devices)
        made = planned(
            profile, cluster, schedule=schedule, num_microbatches=num_microbatches,
            max_replicas=None,
        )  # fmt: skip
        used = {device for stage in made.stages for device in stage.devices}
        assert len(used) >= devices - 1


def test_a_race_passes_over_what_the_schedule_refuses():
    profile, cluster = chain_profile([1e-3] * 12), Cluster.uniform(3)
    options = PlanOptions(schedule="interleaved_1f1b", num_microbatches=128)
    request = PlanningRequest(profile, cluster, options)
    tournament = Tournament(request)
    cuts = tuple(range(0, 13, 2))
    refused = Assignment(cuts, (1,) * 6, (0,) * 6, (1, 2, 3) * 2, (False,) * 6, chunks=2)
    with pytest.raises(InvalidInput, match="cannot be divided into 42 rounds"):
        request.cost_model.stages(refused)
    tournament.add([refused])
    assert tournament.best is None


@pytest.mark.parametrize("schedule", CHUNKED)
def test_stages_of_a_pipeline_may_be_on_different_kinds(schedule):
    """Two devices of different kinds, two stages each: every pipeline used to be of one kind."""
    profile = chain_profile([1e-3] * 12)
    made = planned(profile, mixed(1, 1), schedule=schedule, num_stages=4)
    assert {stage.devices for stage in made.stages} == {("fast:0",), ("slow:0",)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fast_devices_get_more_work(schedule):
    made = planned(chain_profile([1e-3] * 24), mixed(1, 1, speed=3.0), schedule=schedule,
                   num_microbatches=16)  # fmt: skip
    work = {"fast:0": 0, "slow:0": 0}
    for stage in made.stages:
        work[stage.devices[0]] += stage.num_layers
    assert work["fast:0"] >= 2 * work["slow:0"] > 0


def held_bytes(made):
    held = {}
    for stage in made.stages:
        for device in stage.devices:
            held[device] = held.get(device, 0) + stage.memory.total_bytes
    return held


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_device_has_room_for_all_its_stages_together(schedule, seed):
    """Half of what the roomiest plan takes does not do; what some plan takes does."""
    profile = random_profile(seed, 10, ties=0, illegal=0.0)
    cluster = Cluster.uniform(2)
    asked = {"schedule": schedule, "num_microbatches": 4, "optimizer": "none"}
    made = planned(profile, cluster, **asked)
    needed = max(held_bytes(made).values())
    tight = planned(profile, limited(cluster, needed), **asked)
    assert max(held_bytes(tight).values()) <= needed
    with pytest.raises(Infeasible, match="for example, device 'device:") as caught:
        plan(profile, limited(cluster, needed // 3), PlanOptions(**asked))
    assert caught.value.required > caught.value.available == needed // 3


@pytest.mark.parametrize("seed", range(6))
def test_where_stages_fit_their_devices_a_plan_is_found(seed):
    """Every cut of zero_bubble's stages tried, the roomiest one's bytes are enough."""
    profile = random_profile(seed, 8, ties=0, illegal=0.0)
    options = PlanOptions(schedule="zero_bubble", num_microbatches=4, num_stages=3)
    cluster = Cluster.uniform(3)
    needed = min(
        max(split.memory(stage).total_bytes for stage in range(3))
        for one, other in combinations(range(1, 8), 2)
        for split in [
            ReferenceSplit(
                (one, other - one, 8 - other), ((0,), (1,), (2,)), profile, cluster, options
            )
        ]
    )
    made = planned(profile, limited(cluster, int(needed * 1.02) + 1), **dict(options))
    assert max(held_bytes(made).values()) <= needed * 1.02 + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputing_makes_room(schedule):
    profile = chain_profile([1e-3] * 8, forward_bytes=1, saved_bytes=1000)
    cluster = Cluster.uniform(2, memory_bytes=5_000)
    asked = {"schedule": schedule, "num_microbatches": 8, "optimizer": "none"}
    with pytest.raises(Infeasible, match="recompute='auto'"):
        plan(profile, cluster, PlanOptions(**asked))
    made = planned(profile, cluster, **asked, recompute="auto")
    assert any(stage.recompute == "always" for stage in made.stages)


def alternating(count):
    """Pins of the first layers to one kind and the other in turn."""
    return tuple(
        Pin(layer=f"layer.{index}", kind=("fast", "slow")[index % 2]) for index in range(count)
    )


@pytest.mark.parametrize(("fast", "slow"), [(1, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_pinned_to_kinds_are_planned_where_devices_allow(schedule, fast, slow):
    """Cuts used to be chosen without a look at the pins: most requests had no plan."""
    profile = chain_profile([1e-3] * 20)
    rounds = CHUNKS.get(schedule, 2)
    asked = {"schedule": schedule, "max_replicas": None, "num_microbatches": 16}
    for pins in (
        alternating(2),
        (Pin(layer="layer.0", kind="slow"), Pin(layer="layer.3", kind="fast")),
        alternating(rounds * 2 if schedule not in FOLDED else 2),
        (Pin(layer="layer.17", kind="fast"), Pin(layer="layer.19", kind="slow")),
    ):
        made = planned(profile, mixed(fast, slow), **asked, pins=pins)
        assert len({stage.devices[0][:4] for stage in made.stages}) == 2


def test_pins_to_stages_place_the_cuts():
    pins = (Pin(layer="layer.1", stage=1), Pin(layer="layer.10", stage=2))
    for schedule in SCHEDULES:
        made = planned(PROFILES["even"], CLUSTERS["flat"], schedule=schedule, pins=pins)
        assert made.balance[0] == 1


def refusal(profile, cluster, **asked):
    with pytest.raises(Infeasible) as caught:
        plan(profile, cluster, PlanOptions(**asked))
    return caught.value


def test_refusals_name_what_does_not_go():
    even, flat = PROFILES["even"], CLUSTERS["flat"]
    with pytest.raises(InvalidInput, match="on each device, and num_stages=3 is not a multiple of"):
        plan(even, flat, PlanOptions(schedule="zbv", num_stages=3))
    error = refusal(even, flat, schedule="looped_bfs", num_stages=10)
    assert "10 stages, 2 on each, need 5 devices, but the cluster has 4" in str(error)
    error = refusal(even, flat, schedule="interleaved_1f1b", num_stages=6, num_microbatches=7)
    assert "7 cannot be divided into 2 rounds over 3 ranks" in str(error)
    assert error.constraint == "schedule"
    error = refusal(PROFILES["short"], flat, schedule="looped_bfs", chunks=3)
    assert (
        "3 stages on each device, but the layers, their cuts and the options allow only 2"
        in str(error)
    )
    error = refusal(even, mixed(1, 1), schedule="zero_bubble", pins=alternating(3))
    assert error.constraint == "constraints"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_sent_between_stages_of_one_device(schedule):
    profile = chain_profile([1e-3] * 6, forward_bytes=10**6)
    made = planned(profile, Cluster.uniform(2, bandwidth_bytes_per_s=1e5), schedule=schedule,
                   num_microbatches=4)  # fmt: skip
    for one, other in zip(made.stages, made.stages[1:], strict=False):
        sent = (one.send_forward_bytes, other.send_backward_bytes)
        assert (sent == (0, 0)) == (one.devices == other.devices)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_links_are_priced_alike(schedule):
    level = LinkLevel(group_size=3, bandwidth_bytes_per_s=1e6, shared=True)
    cluster = Cluster(devices=Cluster.uniform(3).devices, levels=(level,))
    profile = chain_profile([1e-3] * 9, forward_bytes=200)
    planned(profile, cluster, schedule=schedule, num_microbatches=6)


@pytest.mark.parametrize("seed", range(40))
def test_micro_batches_in_flight_are_the_schedules_own(seed):
    draw = random.Random(seed)
    schedule = draw.choice(SCHEDULES)
    chunks = CHUNKS.get(schedule, draw.choice([1, 2, 3]))
    ranks, replicas = draw.randrange(1, 4), draw.randrange(1, 4)
    num_stages = ranks * chunks
    m = draw.choice([ranks * replicas * draw.randrange(1, 4), draw.randrange(1, 20)])
    profile, cluster = chain_profile([1] * num_stages), Cluster.uniform(ranks * replicas)
    options = PlanOptions(schedule=schedule, num_microbatches=m, chunks=chunks)
    devices = group_devices(cluster, options)
    cost_model = CostModel(chain_costs(profile, legal_positions(profile)), devices, options)
    one = place_stages(tuple(range(ranks + 1)), (replicas,) * ranks, devices)
    assignment = Assignment(
        tuple(range(num_stages + 1)), (replicas,) * num_stages, (0,) * num_stages,
        one.ends * chunks, (False,) * num_stages, chunks=chunks,
    )  # fmt: skip
    try:
        expected = tuple(
            in_flight(schedule, stage, num_stages, m, replicas=assignment.replicas, chunks=chunks)
            for stage in range(num_stages)
        )
    except InvalidInput:
        with pytest.raises(InvalidInput):
            cost_model.depths(assignment)
        return
    assert cost_model.depths(assignment) == expected


def test_an_order_is_made_once_for_all_stages_and_cuts(monkeypatch):
    """It was made once for each stage of each candidate."""
    made = []
    monkeypatch.setattr(
        price, "make_order", lambda *args, own=price.make_order, **more: (
            made.append((args[1:3], tuple(more.items()))), own(*args, **more))[1],
    )  # fmt: skip
    plan(PROFILES["even"], Cluster.uniform(3), PlanOptions(schedule="looped_bfs"))
    assert made
    assert len(made) % len(set(made)) == 0
    assert len(made) <= 3 * len(set(made))  # the plan, and what the service of tables asks again


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_one_micro_batch_of_a_split_backward_is_below_its_whole_work(schedule):
    """Gradients go on before those of weights are done, so F + B is no bound: 2 + 2 + 1 < 6.

    Two stages at least have B / 3 and 2 B / 3; more have the first layer's weights at the end.
    """
    profile = chain_profile([1, 1, 1, 1])
    made = planned(profile, Cluster.uniform(2), schedule=schedule, num_microbatches=1)
    assert made.step_time_s < 4 * 3
    # All plans are played; what is known without that is in `test_bounds_by_hand`.
    assert made.proof.simulated_lower_bound_s == made.step_time_s == made.proof.lower_bound


def test_every_way_to_spread_is_a_way_a_plan_may_be_placed():
    profile = chain_profile([1] * 6)
    for cluster in (mixed(), two_level_cluster(6), mixed(1, 1), mixed(3, 3)):
        options = PlanOptions(schedule="zero_bubble", max_replicas=None, num_microbatches=12)
        devices = group_devices(cluster, options)
        for count in range(1, 5):
            for replicas in (1, 2, 3):
                found = list(list_device_layouts(count, replicas, devices))
                assert len(found) == len(set(found))
                for entry in found:
                    places = tuple(entry.device_indices(devices, s) for s in range(count))
                    counts = (1,) * (count - 1) + (7 - count,)
                    split = ReferenceSplit(counts, places, profile, cluster, options)
                    assert list(split.basic_faults()) == []


def test_many_devices_are_planned_in_time():
    """Few micro-batches and much memory want all devices; shapes are tried by their promise."""
    profile = chain_profile([1e-3] * 200, parameter_bytes=100, saved_bytes=100)
    made = planned(profile, Cluster.uniform(32), schedule="zero_bubble", num_microbatches=64)
    assert made.num_stages >= 24
    assert several.MAX_RANKS >= 32


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("memory_bytes", [None, 14_000])
def test_a_deadline_holds_and_brings_a_plan(schedule, memory_bytes):
    """Large pipelines used to be looked at whole before the clock was: a minute for 3 s."""
    profile = chain_profile([1e-3] * 200, parameter_bytes=40, saved_bytes=20)
    cluster = limited(Cluster.uniform(64), memory_bytes)
    started = time.process_time()
    made = planned_by(profile, cluster, 0.3, schedule=schedule, num_microbatches=128)
    assert time.process_time() - started < 15
    assert made.proof.lower_bound <= made.proof.value
    soon = planned_by(profile, cluster, 0.0, schedule=schedule, num_microbatches=128)
    assert soon.step_time_s >= made.step_time_s


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 0.1, 60.0])
def test_little_time_goes_into_the_most_promising_plan(left_s):
    """On a busy machine 0.3 s brought 6 stages on 3 devices, and no time at all 128 on 64."""
    profile = chain_profile([1e-3] * 200, parameter_bytes=40, saved_bytes=20)
    request = PlanningRequest(
        profile,
        Cluster.uniform(64),
        PlanOptions(schedule="looped_bfs", num_microbatches=128),
        deadline=time.monotonic() + left_s,
    )
    first = several.CandidateSource(request).promising()[0]
    assert (first.ranks, first.replicas) == (64, 1)


@pytest.mark.parametrize("memory_bytes", [None, 14_000])
def test_a_plan_is_tried_however_late_it_is(memory_bytes):
    """Half a second after the deadline there was none, though the first tried is one."""
    profile = chain_profile([1e-3] * 200, parameter_bytes=40, saved_bytes=20)
    request = PlanningRequest(
        profile,
        limited(Cluster.uniform(64), memory_bytes),
        PlanOptions(schedule="dualpipev", num_microbatches=128),
        deadline=time.monotonic() - 60,
    )
    made, bound_s = several.search_by_simulation(request)
    assert bound_s <= made.step_time_s


def planned_by(profile, cluster, deadline_s, **asked):
    return plan(profile, cluster, PlanOptions(**asked), deadline_s=deadline_s)


def test_where_the_search_gave_up_a_plan_is_still_found():
    """Four kinds of devices and a deadline of nothing: there was no plan at all."""
    profile = chain_profile([1e-3] * 60, parameter_bytes=40, saved_bytes=20)
    devices = tuple(
        Device(
            name=f"{index}", kind=f"k{index % 4}", speed=4 - index % 4,
            memory_bytes=1_000 * (1 + index % 4),
        )
        for index in range(24)
    )  # fmt: skip
    cluster = Cluster(devices=devices, levels=Cluster.uniform(24).levels)
    for schedule in ("gpipe", "1f1b"):
        made = planned_by(profile, cluster, 0.0, schedule=schedule, num_microbatches=16)
        validate(made, profile, cluster)
