"""Every kind of corruption of a plan is found, and named."""

import pytest

from stagewright.core.cluster import Cluster
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.families import MLPSpec
from stagewright.core.plan import Plan, PlanOptions
from stagewright.planner.from_balance import plan_from_balance
from stagewright.planner.plan import plan
from stagewright.planner.validate import validate
from tests.builders import boundary, chain_profile, random_profile

SEED = 17
"""Of a profile whose plan sends something over both cuts and splits a tied weight."""

PROFILE = random_profile(SEED, 8, ties=1, illegal=0)
CLUSTER = Cluster.uniform(3, memory_bytes=10**6, bandwidth_bytes_per_s=1e6)
OPTIONS = PlanOptions(num_stages=3, num_microbatches=4)
PLAN = plan(PROFILE, CLUSTER, OPTIONS)


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
    "num_microbatches is": lambda: changed(num_microbatches=5),
    "2 were asked for": lambda: changed(options=PlanOptions(num_stages=2, num_microbatches=4)),
    "stage 1 is on gpu:9": lambda: stage_changed(1, devices=("gpu:9",)),
    "asks for recomputation": lambda: stage_changed(0, recompute="always"),
    "boundaries[0]": lambda: changed(boundaries=(boundary(0), *PLAN.boundaries[1:])),
    "lists 0 boundaries for 2 cuts": lambda: changed(boundaries=()),
    "stage 0: forward_time_s": lambda: stage_changed(0, forward_time_s=1.0),
    "stage 0: backward_time_s": lambda: stage_changed(0, backward_time_s=1.0),
    "stage 0: send_forward_time_s": lambda: stage_changed(0, send_forward_time_s=1.0),
    "stage 2: send_backward_time_s": lambda: stage_changed(2, send_backward_time_s=1.0),
    "stage 0: send_forward_bytes": lambda: stage_changed(0, send_forward_bytes=7),
    "stage 2: send_backward_bytes": lambda: stage_changed(2, send_backward_bytes=7),
    "stage 0: module_fqns": lambda: stage_changed(0, module_fqns=()),
    "stage 0: in_flight": lambda: stage_changed(0, in_flight=1),
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
        {"devices": ("device:0",)},
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


def test_another_cluster_is_refused():
    with pytest.raises(PlanMismatch, match="stage 2 is on device:2, expected none"):
        validate(PLAN, PROFILE, Cluster.uniform(2, memory_bytes=10**6))
    used = PLAN.stages[0].memory.total_bytes
    with pytest.raises(PlanMismatch, match=f"stage 0: needs {used} bytes, its device allows"):
        validate(PLAN, PROFILE, Cluster.uniform(3, memory_bytes=used - 1))
    with pytest.raises(PlanMismatch, match="send_forward_time_s"):
        validate(PLAN, PROFILE, Cluster.uniform(3, memory_bytes=10**6, latency_s=1.0))


def test_a_cut_that_is_no_longer_legal_is_refused():
    profile = chain_profile([1, 1])
    made = plan_from_balance(profile, Cluster.uniform(2), None, [1, 1])
    gaps = (boundary(0, legal=False),)
    stricter = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    with pytest.raises(PlanMismatch, match="the cut behind stage 0 is not legal: a test forbids"):
        validate(made, stricter, Cluster.uniform(2))


def test_more_1f1b_stages_than_microbatches_are_refused():
    """torch's Schedule1F1B would refuse to run it."""
    profile, cluster = chain_profile([1, 1, 1]), Cluster.uniform(3)
    options = PlanOptions(num_microbatches=2, schedule="gpipe")
    made = plan_from_balance(profile, cluster, options, [1, 1, 1])
    validate(made, profile, cluster)
    fields = {"options": PlanOptions(num_microbatches=2), "schedule": "1f1b"}
    other = Plan.model_validate({**dict(made), **fields})
    with pytest.raises(PlanMismatch, match="3 stages, but num_microbatches is 2;"):
        validate(other, profile, cluster)


def test_a_baseline_has_no_time_exactly_where_it_cannot_be_used():
    heavy_front = chain_profile([1, 1, 1, 1], saved_bytes=100)
    gaps = (boundary(0), boundary(1, legal=False), boundary(2))
    strict = type(heavy_front).model_validate({**dict(heavy_front), "boundaries": gaps})
    options = PlanOptions(num_stages=2, num_microbatches=2, optimizer="none")
    even = Cluster.uniform(2)
    limits = [
        device.model_copy(update={"memory_bytes": limit})
        for device, limit in zip(even.devices, (200, 300), strict=True)
    ]
    uneven = even.model_copy(update={"devices": tuple(limits)})
    for profile, cluster in ((strict, even), (heavy_front, uneven)):
        made = plan(profile, cluster, options)
        equal = made.baseline("equal_layers")
        assert equal.step_time_s is None
        validate(made, profile, cluster)
        timed = equal.model_copy(update={"step_time_s": 15.0})
        with pytest.raises(PlanMismatch, match=r"'equal_layers': step_time_s is 15.0, .* None"):
            validate(made.model_copy(update={"baselines": (timed,)}), profile, cluster)


def test_the_error_can_be_told_from_a_bad_request():
    assert not issubclass(PlanMismatch, InvalidInput)
