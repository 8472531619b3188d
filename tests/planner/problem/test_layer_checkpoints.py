"""Plans whose layers keep their inputs and run again in the backward."""

import random

import pytest

from stagewright.core.errors import Infeasible, InvalidInput, PlanMismatch
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.explain import explain
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.problem.layer_checkpoints import list_checkpoints
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile, random_cluster, random_profile, split_profile

MIB = 2**20
DEEP = chain_profile([0.01] * 8, parameter_bytes=MIB, forward_bytes=MIB, saved_bytes=16 * MIB)
LAYERS = PlanOptions(num_microbatches=4, recompute="layers")


def test_a_stage_keeps_inputs_of_layers_and_one_layer_at_work():
    made = plan_from_balance(DEEP, "2x1GB", LAYERS, [4, 4])
    second = made.stages[1]
    assert (second.recompute, second.checkpoints) == ("layers", ((4, 5), (5, 6), (6, 7), (7, 8)))
    assert second.memory.activations_bytes == 4 * MIB * second.in_flight
    assert second.memory.workspace_bytes == 16 * MIB
    whole = plan_from_balance(DEEP, "2x1GB", PlanOptions(recompute="always"), [4, 4]).stages[1]
    assert whole.memory.workspace_bytes == 4 * 16 * MIB
    assert second.backward_time_s == whole.backward_time_s == pytest.approx(4 * 0.03)
    assert Plan.from_json(made.to_json()) == made


def test_layers_fit_where_neither_whole_stages_nor_none_recomputed_fit():
    one = {"num_microbatches": 2, "num_stages": 1}
    for recompute in ("never", "auto", "always"):
        with pytest.raises(Infeasible, match="recompute='layers'") as error:
            plan(DEEP, "1x80MB", PlanOptions(**one, recompute=recompute))
        assert "layers" in [remedy.options.recompute for remedy in error.value.remedies]
    made = plan(DEEP, "1x80MB", PlanOptions(**one, recompute="layers"))
    validate(made, DEEP, "1x80MB")


def test_what_halves_nothing_stays_as_it_is():
    """A head saves its input and no more; what reads nothing has nothing to run again from."""
    layers = list(DEEP.layers)
    storages = list(DEEP.storages)
    storages[-1] = storages[-1].model_copy(update={"size_bytes": 2 * MIB - 1})
    shallow = DEEP.model_copy(update={"layers": tuple(layers), "storages": tuple(storages)})
    assert list_checkpoints(DEEP) == tuple((at, at + 1) for at in range(1, 8))
    assert list_checkpoints(shallow) == tuple((at, at + 1) for at in range(1, 7))


def test_layers_that_keep_state_run_once():
    layers = list(DEEP.layers)
    kept = layers[3].layer.model_copy(update={"stateful": "count"})
    layers[3] = layers[3].model_copy(update={"layer": kept})
    profile = DEEP.model_copy(update={"layers": tuple(layers)})
    assert (3, 4) not in list_checkpoints(profile)
    made = plan(profile, "2x1GB", LAYERS)
    validate(made, profile, "2x1GB")


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_are_what_the_second_computation_says(seed):
    draw = random.Random(seed)
    profile = random_profile(seed, draw.randrange(2, 9), storages=seed % 3 > 0)
    cluster = random_cluster(seed, draw.randrange(1, 5))
    options = PlanOptions(
        num_microbatches=draw.randrange(1, 7),
        schedule=draw.choice(["1f1b", "gpipe", "interleaved_1f1b"]),
        max_replicas=draw.choice([1, None]),
        recompute="layers",
    )
    try:
        made = plan(profile, cluster, options)
    except Infeasible:
        return
    validate(made, profile, cluster)
    never = plan(profile, cluster, options.model_copy(update={"recompute": "never"}))
    assert made.step_time_s >= never.proof.simulated_lower_bound_s * (1 - 1e-9)


def test_split_layers_are_recomputed_too():
    profile = split_profile()
    options = PlanOptions(num_microbatches=4, tensor=2, recompute="layers")
    made = plan(profile, "4x80GB", options)
    assert {stage.tensor for stage in made.stages} == {2}
    validate(made, profile, "4x80GB")


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoints": ((4, 5),)},
        {"recompute": "never", "checkpoints": ()},
        {"backward_time_s": 0.08},
    ],
)
def test_a_changed_plan_is_refused(change):
    made = plan_from_balance(DEEP, "2x1GB", LAYERS, [4, 4])
    second = made.stages[1].model_copy(update=change)
    changed = made.model_copy(update={"stages": (made.stages[0], second)})
    with pytest.raises(PlanMismatch, match="stage 1: "):
        validate(changed, DEEP, "2x1GB")


@pytest.mark.parametrize(
    "options", [{"schedule": "zero_bubble"}, {"schedule": "zbv"}, {"layer_order": "any"}]
)
def test_options_that_do_not_go_with_it_are_refused(options):
    with pytest.raises(InvalidInput, match="recompute='layers'"):
        plan(DEEP, "2x1GB", PlanOptions(recompute="layers", **options))


def test_a_chosen_schedule_has_whole_backwards():
    made = plan(DEEP, "4x1GB", LAYERS, schedule="auto", chunks="auto")
    assert made.schedule in ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")
    assert all(stage.recompute == "layers" for stage in made.stages if stage.first_layer)


def test_latency_has_no_backward():
    made = plan(DEEP, "2x1GB", PlanOptions(objective="latency", recompute="layers"))
    assert {stage.recompute for stage in made.stages} == {"never"}
    validate(made, DEEP, "2x1GB")


def test_explain_compares_with_it():
    made = plan(DEEP, "2x120MB", PlanOptions(num_microbatches=4, recompute="always"))
    found = explain(made, DEEP, "2x120MB", deadline_s=5)
    assert "recomputation layer by layer" in [each.text for each in found.alternatives]
