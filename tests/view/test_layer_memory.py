"""Cause: profiles that list weights and saved activations apart showed 0 B for every layer."""

from __future__ import annotations

import pytest

from stagewright import plan
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.layer_columns import LayerMemory
from tests.builders import chain_profile, random_profile


def without_layers_own(profile):
    """Bytes by parameters and storages alone, as `uneven_profile` of the benchmarks has them."""
    layers = tuple(
        entry.model_copy(
            update={
                "layer": entry.layer.model_copy(update={"parameter_bytes": 0}),
                "saved_activation_bytes": 0,
            }
        )
        for entry in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


@pytest.mark.parametrize("seed", range(5))
def test_any_stage_holds_what_the_planner_says(seed):
    profile = without_layers_own(random_profile(seed, 9, ties=3, illegal=0))
    options = PlanOptions(num_microbatches=3, num_stages=3, optimizer="sgd")
    made = plan(profile, Cluster.parse("3x80GB"), options)
    held = LayerMemory(profile)
    for stage in made.stages:
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        assert held.weights_bytes(layers) == stage.memory.weights_bytes > 0
        loss = profile.loss if stage is made.stages[-1] else None
        kept = held.saved_bytes(layers) + (loss.saved_activation_bytes if loss else 0)
        assert kept * stage.in_flight == stage.memory.activations_bytes


def test_tied_weights_count_at_each_layer_and_once_in_a_box():
    """As GPT-2's ``wte`` and ``lm_head``."""
    profile = chain_profile([1.0, 1.0, 1.0], parameter_bytes=400, saved_bytes=10)
    first, middle, _ = profile.parameters
    tied = first.model_copy(update={"names": ("wte", "lm_head"), "layers": (0, 2)})
    profile = without_layers_own(profile.model_copy(update={"parameters": (tied, middle)}))
    made = plan(profile, Cluster.parse("1x24GB"), PlanOptions())
    view = build_plan_view(made, profile)
    assert view.layers.parameter_bytes == (400, 400, 400)
    assert view.layers.saved_bytes == (10, 10, 10)
    assert view.graph.names == ("layer",)
    assert view.graph.parameter_bytes == (800,)
    assert made.stages[0].memory.weights_bytes == 800


def test_bytes_that_only_layers_give_are_taken_from_them():
    profile = chain_profile([1.0, 1.0], parameter_bytes=400, saved_bytes=10)
    profile = profile.model_copy(update={"parameters": (), "storages": ()})
    held = LayerMemory(profile)
    assert (held.weights_bytes((0, 1)), held.saved_bytes((0, 1))) == (800, 20)
