"""Every option with every objective and schedule: kept by a plan that holds, or refused by name."""

import random
from itertools import product
from typing import get_args

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Objective, Pin, PlanOptions
from stagewright.core.plan.schedule import TrainingSchedule
from stagewright.core.profile.profile import SplitLayer, TensorSplit
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from stagewright.schedules.traits import FOLDED, SEVERAL_STAGES
from tests.builders import chain_profile

HALF = SplitLayer(
    compute_share=0.5,
    parameter_bytes=2000,
    saved_activation_bytes=300,
    forward_reduced_bytes=1000,
    forward_reductions=1,
)

PROFILE = chain_profile(
    [1e-3, 2e-3, 1e-3, 3e-3], forward_bytes=1000, parameter_bytes=4000, saved_bytes=500
).model_copy(
    update={
        "inputs": (TensorSpec(name="x", shape=(2, 8), dtype="float32"),),
        "splits": (TensorSplit(degree=2, layers=(HALF,) * 4),),
    }
)

EQUAL = Cluster(
    devices=tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(3)),
    levels=(LinkLevel(group_size=3, bandwidth_bytes_per_s=1e8),),
)
TWO_KINDS = Cluster(
    devices=tuple(
        Device(name=f"gpu:{index}", kind=kind, speed=speed)
        for index, (kind, speed) in enumerate((("gpu", 1.0), ("gpu", 1.0), ("old", 0.5)))
    ),
    levels=(LinkLevel(group_size=3, bandwidth_bytes_per_s=1e8),),
)

VALUES = {
    "num_microbatches": (1, 6),
    "num_stages": (2, 1),
    "max_stages": (1, 2),
    "max_replicas": (2, None),
    "tensor": (2, "auto"),
    "strategies": (("zero1",), ("replicate", "fully_shard")),
    "recompute": ("auto", "always"),
    "chunks": (1, 3),
    "max_extra_in_flight": (2,),
    "batch_size": (2,),
    "optimizer": ("none", "momentum"),
    "memory_fraction": (0.5,),
    "together": ((("layer.1", "layer.2"),),),
    "no_cut_after": (("layer.0",),),
    "pins": (
        (Pin(layer="layer.2", stage=0),),
        (Pin(layer="layer.0", stage=0),),
        (Pin(layer="layer.0", kind="gpu"),),
    ),
    "tied": ("together",),
    "layer_order": ("any",),
    "skips": ("direct",),
    "cut_at": ("blocks",),
    "regular": ("grid", "equal_blocks"),
    "regular_within": (0.1,),
    "gap": (0.1,),
    "robust": (True,),
}


def is_kept(made, options):
    """What `validate` does not say of a plan: that it is of the objective, schedule and sizes."""
    # What a plan names where it was left open, or chooses.
    taken = {
        name: getattr(made.options, name)
        for name in ("num_microbatches", "precision", "reserves")
        if name == "num_microbatches" or getattr(options, name) is None
    }
    if options.tensor == "auto":
        assert made.options.tensor in (1, 2)
        taken |= {"tensor": made.options.tensor}
    if options.regular_within is not None:  # whichever plan was taken, it has its rule
        taken |= {"regular": made.options.regular, "regular_within": None}
    if len(options.strategies) > 1:  # whichever makes the step shorter
        assert set(made.options.strategies) <= set(options.strategies)
        taken |= {"strategies": made.options.strategies}
    assert made.options == options.model_copy(update=taken)
    if options.objective == "latency":
        assert (made.schedule, made.num_microbatches, made.chunks) == ("forward_only", 1, 1)
        told = " ".join(note for note in made.notes if "no effect" in note)
        for name in ("schedule", "num_microbatches", "optimizer", "recompute", "max_replicas"):
            is_asked = getattr(made.options, name) != getattr(PlanOptions(), name)
            assert is_asked == (name in told)
        return
    assert made.schedule == options.schedule
    chunks = 2 if options.schedule in FOLDED else options.chunks
    assert made.chunks == (chunks if options.schedule in SEVERAL_STAGES else 1)
    samples = made.num_microbatches * made.inputs[0].shape[0]
    assert options.batch_size in (None, samples)
    if options.batch_size is None:
        assert made.num_microbatches == options.num_microbatches
    again = {stage.recompute for stage in made.stages}
    assert options.recompute != "always" or again == {"always"}


def outcome(asked, cluster):
    """`None` for a plan that holds, else the option that was refused."""
    options = PlanOptions(**asked)
    try:
        made = plan(PROFILE, cluster, options)
    except InvalidInput as error:
        return named(error, options)
    validate(made, PROFILE, cluster)
    is_kept(made, options)
    return None


def named(error, options):
    """The option an error is about, which its text names or quotes."""
    name = (error.field or "").removeprefix("/options/")
    assert name in PlanOptions.model_fields, error
    assert name in str(error) or repr(getattr(options, name)) in str(error), error
    return name


@pytest.mark.parametrize("objective", get_args(Objective))
def test_each_option_alone_is_kept_or_refused(objective):
    for schedule, name in product(get_args(TrainingSchedule), VALUES):
        for value in VALUES[name]:
            asked = {"objective": objective, "schedule": schedule, name: value}
            if objective == "pipedream":
                asked = {"max_replicas": None} | asked
            refused = outcome(asked, EQUAL)
            assert refused in (None, name, "schedule", "num_microbatches"), asked


@pytest.mark.parametrize("seed", range(5))
def test_options_together_are_kept_or_refused(seed):
    draw, plans = random.Random(seed), 0
    for _ in range(60):
        asked = {name: draw.choice(VALUES[name]) for name in draw.sample(sorted(VALUES), 3)}
        asked["objective"] = draw.choice(get_args(Objective))
        asked["schedule"] = draw.choice(["1f1b", "gpipe", *get_args(TrainingSchedule)])
        refused = outcome(asked, draw.choice([EQUAL, TWO_KINDS]))
        assert refused is None or refused in {*asked, "num_microbatches", "max_replicas"}, asked
        plans += refused is None
    assert plans > 8


REFUSED_EVERYWHERE_ELSE = {
    "chunks": {("step_time", name) for name in SEVERAL_STAGES if name not in FOLDED},
    "max_extra_in_flight": {("step_time", "1f1b")},
}


@pytest.mark.parametrize(("name", "taken"), REFUSED_EVERYWHERE_ELSE.items())
def test_options_of_one_schedule_are_refused_by_all_others(name, taken):
    value = VALUES[name][0]
    for objective, schedule in product(get_args(Objective), get_args(TrainingSchedule)):
        asked = {"objective": objective, "schedule": schedule, name: value}
        refused = outcome(asked, EQUAL)
        assert (refused is None) == ((objective, schedule) in taken), asked
