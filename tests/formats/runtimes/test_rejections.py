"""Every feature a target lacks is refused by its name, with the option that avoids it."""

import random
import re

import pytest

from stagewright.core.plan.plan import DirectSend
from stagewright.formats.expressible import Inexpressible, check_expressible
from stagewright.formats.runtimes.registry import TARGETS, export
from stagewright.view.option_flags import FLAGS
from tests.formats.runtimes.random_plans import build_plan, draw_plan

TRAINS = [name for name, target in TARGETS.items() if not target.rules.inference]
NAMES = ("embed", *(f"layers.{index}" for index in range(8)), "norm", "lm_head")


def make_plan(name, cuts=(0, 3, 5, 7, 11), names=NAMES, **changes):
    """A plan that the target can express (where the cuts are), with changes."""
    rules = TARGETS[name].rules
    schedule = (rules.schedules or ("1f1b",))[0]
    plan = build_plan(names, list(cuts), schedule, 1, random.Random(5), rules)
    return change(plan, **changes)


def change(plan, stages=None, **changes):
    changed = [
        stage.model_copy(update=(stages or {}).get(index, {}))
        for index, stage in enumerate(plan.stages)
    ]
    return plan.model_copy(update={"stages": tuple(changed), **changes})


def every_stage(update):
    return {index: dict(update) for index in range(4)}


def refused(plan, name):
    with pytest.raises(Inexpressible) as error:
        export(plan, name)
    assert f"--for {name}" in str(error.value)
    assert all(rejection.reason and rejection.remedy for rejection in error.value.rejections)
    flags = {
        word for each in error.value.rejections for word in re.findall(r"--[a-z-]+", each.remedy)
    }
    assert flags <= {*FLAGS.values(), "--for"}, "a remedy names a flag that there is"
    return {rejection.feature: rejection for rejection in error.value.rejections}


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_target_can_express_is_not_refused(name):
    draw = random.Random(3)
    for _ in range(100):
        check_expressible(draw_plan(draw, TARGETS[name].rules), TARGETS[name])


@pytest.mark.parametrize("name", TARGETS)
def test_schedules_of_others(name):
    rules = TARGETS[name].rules
    known = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev")
    for schedule in known:
        plan = make_plan(name, schedule=schedule)
        if schedule not in rules.schedules and not rules.inference:
            rejection = refused(plan, name)["schedule"]
            assert schedule in rejection.reason
            assert rules.schedules[0] in rejection.remedy


@pytest.mark.parametrize("name", TARGETS)
def test_training_and_inference_are_told_apart(name):
    plan = make_plan(name)
    backward = 0.0 if name in TRAINS else 1.0
    other = change(plan, every_stage({"backward_time_s": backward}))
    assert ("inference" if name in TRAINS else "training") in refused(other, name)


@pytest.mark.parametrize("name", TARGETS)
def test_replicas(name):
    rules = TARGETS[name].rules
    two = {"replicas": 2, "devices": ("a", "b")}
    one = {"replicas": 1, "devices": ("a",)}
    plan = make_plan(name)
    uneven = change(plan, {0: two, 1: one, 2: one, 3: one})
    even = change(plan, every_stage(two), num_microbatches=7)
    if rules.replicas == "none":
        assert "--max-replicas 1" in refused(uneven, name)["replicas"].remedy
    elif rules.replicas == "equal":
        assert "[2, 1, 1, 1]" in refused(uneven, name)["unequal replicas"].reason
        assert "multiple of 2" in refused(even, name)["unequal shares"].remedy


@pytest.mark.parametrize("name", TARGETS)
def test_recomputation(name):
    rules = TARGETS[name].rules
    never = every_stage({"recompute": "never"})
    plan = change(make_plan(name), never)
    some = change(plan, {1: {"recompute": "always"}})
    expected = "recomputation of some stages" if rules.recompute else "recomputation"
    assert "never" in refused(some, name)[expected].remedy
    for mode in ("always", "except_last"):
        if mode not in rules.recompute:
            every = change(plan, every_stage({"recompute": mode}))
            assert "recomputation" in refused(every, name)


@pytest.mark.parametrize("name", TARGETS)
def test_order_of_layers(name):
    plan = make_plan(name, layer_order=tuple(reversed(range(11))))
    assert refused(plan, name)["order of layers"].remedy == "--order given"


@pytest.mark.parametrize("name", TARGETS)
def test_direct_sends(name):
    send = DirectSend(source=0, target=2, tensors=("skip",))
    plan = make_plan(name, direct_sends=(send,))
    if not TARGETS[name].rules.direct_sends:
        assert "'skip'" in refused(plan, name)["direct sends"].reason


@pytest.mark.parametrize("name", TRAINS)
def test_weights_of_two_stages(name):
    plan = make_plan(name, tied_sync_time_s=1e-3)
    if not TARGETS[name].rules.tied_weights:
        assert refused(plan, name)["tied weights"].remedy == "--tied together"


@pytest.mark.parametrize("name", TRAINS)
def test_more_micro_batches_in_flight_than_1f1b_has(name):
    plan = make_plan(name, schedule="1f1b")
    deeper = change(plan, {1: {"in_flight": plan.stages[1].in_flight + 1}})
    if "1f1b" in TARGETS[name].rules.schedules and not TARGETS[name].rules.own_depths:
        assert "--extra-in-flight 0" in refused(deeper, name)["micro-batches in flight"].remedy


@pytest.mark.parametrize("name", TARGETS)
def test_cuts_inside_blocks_and_modules(name):
    pieces = ("embed", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "layers.2", "head")
    plan = make_plan(name, (0, 3, 6), pieces)
    if TARGETS[name].rules.unit == "block":
        rejection = refused(plan, name)["cut inside a block"]
        assert "'layers.1'" in rejection.reason
        assert rejection.remedy == "--no-cut-after layers.1.attention"
    called_again = ("embed", "layers.0", "layers.1", "layers.0@1", "layers.1@1", "head")
    plan = make_plan(name, (0, 3, 6), called_again)
    if TARGETS[name].rules.unit == "module":
        assert "'layers.0@1'" in refused(plan, name)["cut inside a module"].reason


@pytest.mark.parametrize("name", TARGETS)
def test_cuts_outside_the_blocks(name):
    for cuts, word in (
        (((0, 1, 5, 11)), "before"),
        ((0, 5, 9, 11), "behind"),
        ((0, 5, 10, 11), "behind"),
    ):
        plan = make_plan(name, cuts)
        rules = TARGETS[name].rules
        if rules.unit == "block" and not (rules.cuts_around_blocks and cuts != (0, 5, 10, 11)):
            assert word in refused(plan, name)["cut outside the blocks"].reason


@pytest.mark.parametrize("name", TARGETS)
def test_models_without_one_stack_of_blocks(name):
    stacks = ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    plan = make_plan(name, (0, 2, 4), stacks)
    if TARGETS[name].rules.unit == "block":
        assert "2 stacks" in refused(plan, name)["no blocks"].reason


def test_unequal_stages_of_maxtext():
    plan = make_plan("maxtext", (0, 2, 5, 7, 11))
    assert "[1, 3, 2, 2]" in refused(plan, "maxtext")["unequal stages"].reason


def test_values_that_skip_a_stage_under_a_v_in_torch():
    from tests.builders import boundary

    plan = make_plan("torch", schedule="zbv")
    same = tuple(boundary(after, forward_bytes=4) for after in range(3))
    skipping = plan.model_copy(update={"boundaries": same})
    assert "'hidden'" in refused(skipping, "torch")["values that skip a stage"].reason
