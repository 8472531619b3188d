"""A layer that keeps state gets neither replicas nor recomputation, whatever the options allow."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from tests.builders import chain_profile


def keeping_state(memory_bytes=0):
    """Four layers, one of which is so slow that replicas would pay off."""
    profile = chain_profile([1e-3, 8e-3, 1e-3, 1e-3], saved_bytes=memory_bytes)
    layers = list(profile.layers)
    held = layers[1].layer.model_copy(update={"stateful": "block.calls"})
    layers[1] = layers[1].model_copy(update={"layer": held})
    return profile.model_copy(update={"layers": tuple(layers)})


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory"])
def test_no_stage_has_replicas_or_is_recomputed(objective):
    options = PlanOptions(max_replicas=None, recompute="auto", objective=objective)
    made = plan(keeping_state(), Cluster.uniform(4), options)
    assert {(stage.replicas, stage.recompute) for stage in made.stages} == {(1, "never")}
    (note,) = [note for note in made.notes if "block.calls" in note]
    assert note.startswith("planned without replicas and recomputation: layer 'layer.1' changes")


def test_without_state_replicas_would_have_been_chosen():
    free = chain_profile([1e-3, 8e-3, 1e-3, 1e-3])
    made = plan(free, Cluster.uniform(4), PlanOptions(max_replicas=None))
    assert max(stage.replicas for stage in made.stages) > 1


def test_options_that_allow_neither_leave_no_note():
    made = plan(keeping_state(), Cluster.uniform(2))
    assert not any("block.calls" in note for note in made.notes)


def test_what_cannot_be_kept_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"'layer\.1' changes 'block\.calls'.*recompute='never'"):
        plan(keeping_state(), Cluster.uniform(2), PlanOptions(recompute="always"))
    with pytest.raises(InvalidInput, match=r"'block\.calls'.*give every stage one replica"):
        plan_from_balance(keeping_state(), Cluster.uniform(3), None, [2, 2], replicas=[2, 1])
    with pytest.raises(InvalidInput, match=r"'block\.calls'"):
        plan_from_balance(
            keeping_state(), Cluster.uniform(2), PlanOptions(recompute="always"), [2, 2]
        )
