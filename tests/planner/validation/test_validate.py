"""Every kind of corruption of a plan is found, and named."""

import pytest

import stagewright
from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.models.families import MLPSpec
from stagewright.core.plan.plan import Baseline, Pin, Plan, PlanOptions
from stagewright.planner.explain import explain
from stagewright.planner.validation.reference_cost import ReferenceSplit
from stagewright.planner.validation.validate import validate
from stagewright.schedules.traits import FOLDED
from tests.builders import boundary, chain_profile, random_profile
from tests.planner.instances import instance
from tests.planner.oracle import usable_plans
from tests.planner.written import written

SEED = 17
"""Of a profile whose plan sends something over both cuts and splits a tied weight."""

PROFILE = random_profile(SEED, 8, ties=1, illegal=0)

CLUSTER = Cluster(
    devices=tuple(
        Device(
            name=f"{kind}:{index}",
            kind=kind,
            speed=2.0 if kind == "fast" else 1.0,
            memory_bytes=10**6,
        )
        for index, kind in enumerate(["fast"] * 4 + ["slow"] * 2)
    ),
    levels=(
        LinkLevel(name="node", group_size=2, latency_s=1e-5, bandwidth_bytes_per_s=1e7),
        LinkLevel(name="network", group_size=8, latency_s=1e-4, bandwidth_bytes_per_s=1e6),
    ),
)
"""Two nodes of two fast devices and one of two slow ones."""

OPTIONS = PlanOptions(num_stages=3, num_microbatches=6, max_replicas=None, recompute="auto")

SPLIT = ReferenceSplit(
    counts=(3, 3, 2),
    devices=((0, 1), (2,), (4,)),
    profile=PROFILE,
    cluster=CLUSTER,
    options=OPTIONS,
    recompute=(True, False, False),
)
"""Replicas, recomputation and two kinds of device."""

EQUAL = Baseline(
    name="equal_layers",
    balance=(3, 3, 2),
    step_time_s=SPLIT.step_time_s(),
)
OTHER = Baseline(
    name="balance_by_time",
    balance=(2, 3, 3),
    step_time_s=ReferenceSplit(
        (2, 3, 3), SPLIT.devices, PROFILE, CLUSTER, OPTIONS, SPLIT.recompute
    ).step_time_s(),
)
PLAN = written(SPLIT).model_copy(update={"baselines": (EQUAL, OTHER)})


def stage_changed(index, **fields):
    """The plan with one stage's fields replaced; what the document refuses itself is an error."""
    stages = list(PLAN.stages)
    stages[index] = type(stages[index]).model_validate({**dict(stages[index]), **fields})
    return changed(stages=tuple(stages))


def changed(**fields):
    return Plan.model_validate({**dict(PLAN), **fields})


def baseline_changed(name, **fields):
    """The plan with one baseline's fields replaced."""
    return changed(
        baselines=tuple(
            entry.model_copy(update=fields) if entry.name == name else entry
            for entry in PLAN.baselines
        )
    )


def asked(**fields):
    """The plan as an answer to other options."""
    return changed(options=PlanOptions.model_validate({**dict(OPTIONS), **fields}))


def moved(*devices):
    """The plan with its first stages on other devices."""
    stages = [
        stage.model_copy(update={"devices": names})
        for stage, names in zip(PLAN.stages, devices, strict=False)
    ]
    return changed(stages=(*stages, *PLAN.stages[len(stages) :]))


def memory_changed(**fields):
    return stage_changed(1, memory=PLAN.stages[1].memory.model_copy(update=fields))


def proof_changed(**fields):
    return changed(proof=PLAN.proof.model_copy(update=fields))


def test_the_plan_itself_holds():
    validate(PLAN, PROFILE, CLUSTER)


CORRUPTIONS = {
    "planned from profile_0": lambda: changed(profile_id="profile_0"),
    "planned from a profile it does not name": lambda: changed(profile_id=""),
    "spec is": lambda: changed(spec=MLPSpec(family="mlp")),
    "model is": lambda: changed(model="Other"),
    "inputs is": lambda: changed(inputs=()),
    "input_structure is": lambda: changed(input_structure="y"),
    "estimated is": lambda: changed(estimated=True),
    "schedule is": lambda: changed(schedule="gpipe"),
    "fixed_mode is": lambda: changed(fixed_mode=("dropout",)),
    "num_microbatches is": lambda: changed(num_microbatches=5),
    "not num_stages=2": lambda: asked(num_stages=2),
    "more than max_stages=2": lambda: asked(num_stages=None, max_stages=2),
    "stage 0 has 2 replicas, more than 1": lambda: asked(max_replicas=1),
    "stage 0 is recomputed despite recompute='never'": lambda: asked(recompute="never"),
    "stage 1 is not recomputed despite recompute='always'": lambda: asked(recompute="always"),
    "'block.0' and 'block.3' are in stages 0 and 1": lambda: asked(
        together=(("block.0", "block.3"),)
    ),
    "a stage ends after 'block.2', which no_cut_after forbids": lambda: asked(
        no_cut_after=("block.2",)
    ),
    "'block.0' is in stage 0, pinned to stage 2": lambda: asked(
        pins=(Pin(layer="block.0", stage=2),)
    ),
    "'block.0' is on a 'fast', pinned to a 'slow'": lambda: asked(
        pins=(Pin(layer="block.0", kind="slow"),)
    ),
    "'tied.0' is in several stages despite tied='together'": lambda: asked(tied="together"),
    "is 1000000, expected 500000": lambda: asked(memory_fraction=0.5),
    "stage 1 is on gpu:9, which the cluster does not have": lambda: stage_changed(
        1, devices=("gpu:9",)
    ),
    "stage 0: its devices are neither inside one 'node' nor all of several": lambda: moved(
        ("fast:1", "fast:2"), ("fast:3",)
    ),
    "stage 0: its devices are not contiguous": lambda: stage_changed(
        0, devices=("fast:1", "fast:0")
    ),
    "stage 0: its devices differ in kind, speed, memory or class": lambda: stage_changed(
        0, devices=("fast:3", "slow:5")
    ),
    "stage 1 does not follow stage 0 on devices of their kind": lambda: moved(
        ("fast:2", "fast:3"), ("fast:1",)
    ),
    "stage 0: strategy is 'single'": lambda: stage_changed(0, strategy="single"),
    "stage 1: strategy is 'fully_shard'": lambda: stage_changed(1, strategy="fully_shard"),
    "stage 0: recompute='except_last' is not": lambda: stage_changed(0, recompute="except_last"),
    "boundaries[0]": lambda: changed(boundaries=(boundary(0), *PLAN.boundaries[1:])),
    "lists 0 boundaries for 2 cuts": lambda: changed(boundaries=()),
    "stage 0: forward_time_s": lambda: stage_changed(0, forward_time_s=1.0),
    "stage 0: backward_time_s": lambda: stage_changed(0, backward_time_s=1.0),
    "stage 0: send_forward_time_s": lambda: stage_changed(0, send_forward_time_s=1.0),
    "stage 2: send_backward_time_s": lambda: stage_changed(2, send_backward_time_s=1.0),
    "stage 0: send_forward_bytes": lambda: stage_changed(0, send_forward_bytes=7),
    "stage 2: send_backward_bytes": lambda: stage_changed(2, send_backward_bytes=7),
    "stage 0: module_fqns": lambda: stage_changed(0, module_fqns=()),
    "stage 0: in_flight is 1, outside 2 to 2": lambda: stage_changed(0, in_flight=1),
    "stage 0: in_flight is 3, outside 2 to 2": lambda: stage_changed(0, in_flight=3),
    "stage 0: sync_time_s is 0.0": lambda: stage_changed(0, sync_time_s=0.0),
    "weights_bytes=1 ": lambda: memory_changed(weights_bytes=1),
    "gradients_bytes=1 ": lambda: memory_changed(gradients_bytes=1),
    "optimizer_bytes=1 ": lambda: memory_changed(optimizer_bytes=1),
    "activations_bytes=1 ": lambda: memory_changed(activations_bytes=1),
    "workspace_bytes=1 ": lambda: memory_changed(workspace_bytes=1),
    "receive_buffers_bytes=1,": lambda: memory_changed(receive_buffers_bytes=1),
    "stage 0: memory_limit_bytes": lambda: stage_changed(0, memory_limit_bytes=None),
    "tied_sync_time_s": lambda: changed(tied_sync_time_s=1.0),
    "step_time_s": lambda: changed(step_time_s=PLAN.step_time_s * 0.999),
    "bubble_fraction": lambda: changed(bubble_fraction=0.0),
    "proof.value": lambda: proof_changed(value=PLAN.proof.value * 2),
    "'equal_layers': step_time_s is 1000000000.0": lambda: baseline_changed(
        "equal_layers", step_time_s=1e9
    ),
    "'balance_by_time': step_time_s is None": lambda: baseline_changed(
        "balance_by_time", step_time_s=None
    ),
    "'equal_layers' is [3, 2, 3], which are not equal": lambda: baseline_changed(
        "equal_layers", balance=(3, 2, 3)
    ),
    "'balance_by_time' is [4, 4], which is not 8 layers in 3": lambda: baseline_changed(
        "balance_by_time", balance=(4, 4)
    ),
    "'balance_by_time' is [3, 3, 3], which": lambda: baseline_changed(
        "balance_by_time", balance=(3, 3, 3)
    ),
    "'balance_by_time' is [8, -1, 1], which": lambda: baseline_changed(
        "balance_by_time", balance=(8, -1, 1)
    ),
    "'balance_by_time' is [], which": lambda: baseline_changed("balance_by_time", balance=()),
    "is above proof.value": lambda: proof_changed(lower_bound=PLAN.proof.value * 2),
    "is above step_time_s": lambda: proof_changed(simulated_lower_bound_s=PLAN.step_time_s * 1.01),
    "with a gap of": lambda: proof_changed(status="optimal", lower_bound=0.0),
}


@pytest.mark.parametrize("named", CORRUPTIONS)
def test_a_corruption_is_named(named):
    with pytest.raises(PlanMismatch) as caught:
        validate(CORRUPTIONS[named](), PROFILE, CLUSTER)
    assert named.strip(" ,") in str(caught.value)


def test_every_discrepancy_is_listed_at_once():
    stages = [stage.model_copy(update={"forward_time_s": 1.0}) for stage in PLAN.stages]
    with pytest.raises(PlanMismatch) as caught:
        validate(changed(stages=tuple(stages), model="Other"), PROFILE, CLUSTER)
    for named in ("model is", "stage 0: forward", "stage 1: forward", "stage 2: forward"):
        assert named in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"first_layer": 0},
        {"devices": ("fast:0",)},
        {"num_layers": 1},
        {"devices": ()},
        {"forward_time_s": float("nan")},
    ],
)
def test_overlaps_and_shared_devices_are_refused_by_the_document(fields):
    with pytest.raises(ValueError, match=r".+"):
        stage_changed(1, **fields)


def test_layers_under_other_names_or_missing_are_refused():
    renamed = stage_changed(0, layer_names=("other",) * PLAN.stages[0].num_layers)
    with pytest.raises(PlanMismatch, match="not the profile's"):
        validate(renamed, PROFILE, CLUSTER)
    longer = random_profile(SEED, 9)
    with pytest.raises(PlanMismatch, match="not the profile's"):
        validate(PLAN, longer, CLUSTER)


def limited(cluster, memory_bytes):
    devices = [
        device.model_copy(update={"memory_bytes": memory_bytes}) for device in cluster.devices
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


def test_another_cluster_is_refused():
    with pytest.raises(PlanMismatch, match="stage 0 is on fast:0, which the cluster does not"):
        validate(PLAN, PROFILE, Cluster.uniform(2, memory_bytes=10**6))
    used = PLAN.stages[0].memory.total_bytes
    with pytest.raises(PlanMismatch, match=f"stage 0: needs {used} bytes, its device allows"):
        validate(PLAN, PROFILE, limited(CLUSTER, used - 1))
    slower = tuple(level.model_copy(update={"latency_s": 1.0}) for level in CLUSTER.levels)
    with pytest.raises(PlanMismatch, match="send_forward_time_s"):
        validate(PLAN, PROFILE, CLUSTER.model_copy(update={"levels": slower}))


def test_a_plan_that_ignores_that_links_are_shared_is_refused():
    """Its step used to be believed, as played on the connections it named itself."""
    profile = chain_profile([1, 1, 1], forward_bytes=100)
    levels = tuple(
        LinkLevel(group_size=size, latency_s=0, bandwidth_bytes_per_s=10, shared=size == 6)
        for size in (2, 6)
    )
    cluster = Cluster(devices=Cluster.uniform(6).devices, levels=levels)
    alone = Cluster(
        devices=cluster.devices,
        levels=tuple(level.model_copy(update={"shared": False}) for level in levels),
    )
    places, options = ((0,), (2,), (4,)), PlanOptions(num_microbatches=4)
    made = written(ReferenceSplit((1, 1, 1), places, profile, cluster, options))
    other = written(ReferenceSplit((1, 1, 1), places, profile, alone, options))
    assert made.step_time_s > other.step_time_s
    validate(made, profile, cluster)
    validate(other, profile, alone)
    with pytest.raises(PlanMismatch, match=r"forward_channels is \[-1, -1\], expected \[0, 1\]"):
        validate(other, profile, cluster)
    with pytest.raises(PlanMismatch, match=r"backward_channels is \[1, 2\], expected \[-1, -1\]"):
        validate(made, profile, alone)
    fields = {"step_time_s": other.step_time_s, "bubble_fraction": other.bubble_fraction}
    with pytest.raises(PlanMismatch, match=rf"step_time_s is {other.step_time_s}, simulated"):
        validate(made.model_copy(update=fields), profile, cluster)
    called = {"forward_channels": (30, 10), "backward_channels": (10, 20)}
    validate(made.model_copy(update=called), profile, cluster)  # what they are called is free
    baseline = Baseline(name="equal_layers", balance=(1, 1, 1), step_time_s=other.step_time_s)
    with pytest.raises(PlanMismatch, match="'equal_layers': step_time_s is"):
        validate(made.model_copy(update={"baselines": (baseline,)}), profile, cluster)


def test_a_cut_that_is_no_longer_legal_is_refused():
    profile, cluster = chain_profile([1, 1]), Cluster.uniform(2)
    made = written(ReferenceSplit((1, 1), ((0,), (1,)), profile, cluster, PlanOptions()))
    validate(made, profile, cluster)
    gaps = (boundary(0, legal=False),)
    stricter = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    with pytest.raises(PlanMismatch, match="the cut after stage 0 is illegal: a test forbids"):
        validate(made, stricter, cluster)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_there_may_be_more_stages_than_microbatches(schedule):
    profile, cluster = chain_profile([1, 1, 1]), Cluster.uniform(3)
    options = PlanOptions(num_microbatches=2, schedule=schedule)
    made = written(ReferenceSplit((1, 1, 1), ((0,), (1,), (2,)), profile, cluster, options))
    validate(made, profile, cluster)


def test_a_baseline_has_no_time_exactly_where_it_cannot_be_used():
    heavy_front = chain_profile([1, 1, 1, 1], saved_bytes=100)
    gaps = (boundary(0), boundary(1, legal=False), boundary(2))
    strict = type(heavy_front).model_validate({**dict(heavy_front), "boundaries": gaps})
    options = PlanOptions(num_stages=2, num_microbatches=2, optimizer="none")
    even = Cluster.uniform(2)
    for profile, cluster in ((strict, even), (heavy_front, limited(even, 300))):
        made = written(ReferenceSplit((1, 3), ((0,), (1,)), profile, cluster, options))
        equal = Baseline(name="equal_layers", balance=(2, 2), step_time_s=None)
        validate(made.model_copy(update={"baselines": (equal,)}), profile, cluster)
        timed = equal.model_copy(update={"step_time_s": 15.0})
        with pytest.raises(PlanMismatch, match=r"'equal_layers': step_time_s is 15.0, .* None"):
            validate(made.model_copy(update={"baselines": (timed,)}), profile, cluster)


def test_more_microbatches_in_flight_are_accepted_where_they_may_be():
    options = PlanOptions.model_validate({**dict(OPTIONS), "max_extra_in_flight": 1})
    for held, is_right in (((3, 2, 1), True), ((3, 3, 1), True), ((3, 4, 1), False)):
        split = ReferenceSplit(
            SPLIT.counts, SPLIT.devices, PROFILE, CLUSTER, options, SPLIT.recompute, held
        )
        made = written(split)
        if is_right:
            validate(made, PROFILE, CLUSTER)
        else:
            with pytest.raises(PlanMismatch, match="stage 1: in_flight is 4, outside 2 to 3"):
                validate(made, PROFILE, CLUSTER)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("objective", ["step_time", "throughput", "latency", "memory", "devices"])
def test_every_usable_plan_holds(objective, seed):
    problem = instance(seed, objective=objective)
    for number, split in enumerate(usable_plans(problem)):
        if number % 200 == 0:
            validate(written(split), problem.profile, problem.cluster)


def test_the_error_can_be_told_from_a_bad_request():
    assert not issubclass(PlanMismatch, InvalidInput)


@pytest.mark.parametrize(
    ("schedule", "devices", "chunks"),
    [
        ("interleaved_1f1b", (0, 1, 0, 1), 2),
        ("looped_bfs", (0, 1, 0, 1), 2),
        ("interleaved_zero_bubble", (0, 1, 0, 1), 2),
        ("zbv", (0, 1, 1, 0), 2),
        ("dualpipev", (0, 1, 1, 0), 2),
        ("zero_bubble", (0, 1, 2, 3), 1),
    ],
)
def test_schedules_with_several_stages_a_device(schedule, devices, chunks):
    """What a stage holds is counted in the schedule; a device has to fit all its stages."""
    profile = chain_profile([1, 2, 3, 4], saved_bytes=10, forward_bytes=1)
    options = PlanOptions(schedule=schedule, num_microbatches=4)
    cluster = Cluster.uniform(4)
    places = tuple((device,) for device in devices)
    split = ReferenceSplit((1, 1, 1, 1), places, profile, cluster, options, chunks=chunks)
    made = written(split)
    validate(made, profile, cluster)
    needed = sum(stage.memory.total_bytes for stage in made.stages[::3][: 2 if chunks > 1 else 1])
    if schedule in FOLDED:
        with pytest.raises(PlanMismatch, match=f"stage 0: needs {needed} bytes"):
            validate(made, profile, limited(cluster, needed - 1))
    if chunks > 1:
        swapped = (made.stages[0], made.stages[1], *made.stages[2:])
        stages = [
            stage.model_copy(update={"devices": (f"device:{device}",)})
            for stage, device in zip(swapped, (0, 1, *reversed(devices[2:])), strict=True)
        ]
        other = Plan.model_validate({**dict(made), "stages": tuple(stages)})
        with pytest.raises(PlanMismatch, match="stage 2 is not on the devices that its schedule"):
            validate(other, profile, cluster)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "zbv"])
def test_one_device_without_links_holds_several_stages(schedule):
    """Nothing is sent, tied weights included."""
    profile = random_profile(SEED, 8, ties=3, illegal=0)
    cluster = Cluster(devices=(Device(name="cpu", kind="cpu"),))
    found = stagewright.plan(profile, cluster, PlanOptions(num_microbatches=4, schedule=schedule))
    assert len(found.stages) > 1
    assert found.tied_sync_time_s == 0
    validate(found, profile, cluster)
    assert explain(found, profile, cluster).shares.links == 0
