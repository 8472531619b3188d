"""Every feature a target lacks is refused by its name, with the option that avoids it."""

import random
import re

import pytest

from stagewright.core.graph.graph import Parameter
from stagewright.core.plan.plan import DirectSend
from stagewright.formats.expressible import Inexpressible, check_expressible
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import WITHOUT_BLOCKS, ModelLayers, TargetRules
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


def select(has):
    """Return the names of the targets whose rules are such."""
    return [name for name, target in TARGETS.items() if has(target.rules)]


BLOCKS = select(lambda rules: rules.unit == "block")


def rejected(plan, name):
    with pytest.raises(Inexpressible) as error:
        export(plan, name)
    is_of_model = any(each.is_of_model for each in error.value.rejections)
    advised = len(re.findall(rf"--for {re.escape(name)}\b", str(error.value)))
    assert advised == (not is_of_model), "the way out is named, once"
    assert all(rejection.reason and rejection.remedy for rejection in error.value.rejections)
    for each in error.value.rejections:
        assert "--" not in each.remedy.replace("stagewright plan --for", ""), "an option, no flag"
        named = re.findall(r"\b([a-z]+_[a-z_]+|[a-z_]+(?==))", each.remedy.partition("'")[0])
        assert {*named} <= {*FLAGS}, "a remedy names an option that there is"
    return {rejection.feature: rejection for rejection in error.value.rejections}


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_target_can_express_is_not_refused(name):
    draw = random.Random(3)
    for _ in range(100):
        check_expressible(draw_plan(draw, TARGETS[name].rules), TARGETS[name])


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(n, each) for n in TRAINS for each in SCHEDULES if each not in TARGETS[n].rules.schedules],
)
def test_schedules_of_others(name, schedule):
    rejection = rejected(make_plan(name, schedule=schedule), name)["schedule"]
    assert schedule in rejection.reason
    assert TARGETS[name].rules.schedules[0] in rejection.remedy


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", select(lambda rules: rules.inference))
def test_schedules_of_several_stages_a_device(name, schedule):
    """Of forward passes too: their stages were counted as ranks."""
    found = rejected(make_plan(name, schedule=schedule, chunks=2), name)
    assert schedule in found["schedule"].reason


@pytest.mark.parametrize("name", TARGETS)
def test_training_and_inference_are_told_apart(name):
    plan = make_plan(name)
    backward = 0.0 if name in TRAINS else 1.0
    other = change(plan, every_stage({"backward_time_s": backward}))
    assert ("inference" if name in TRAINS else "training") in rejected(other, name)


TWO, ONE = {"replicas": 2, "devices": ("a", "b")}, {"replicas": 1, "devices": ("a",)}


@pytest.mark.parametrize("name", select(lambda rules: rules.replicas == "none"))
def test_replicas(name):
    uneven = change(make_plan(name), {0: TWO, 1: ONE, 2: ONE, 3: ONE})
    assert "max_replicas=1" in rejected(uneven, name)["replicas"].remedy


@pytest.mark.parametrize("name", select(lambda rules: rules.replicas == "equal"))
def test_unequal_replicas(name):
    plan = make_plan(name)
    uneven = change(plan, {0: TWO, 1: ONE, 2: ONE, 3: ONE})
    assert "[2, 1, 1, 1]" in rejected(uneven, name)["unequal replicas"].reason
    even = change(plan, every_stage(TWO), num_microbatches=7)
    assert "multiple of 2" in rejected(even, name)["unequal shares"].remedy


@pytest.mark.parametrize("name", TARGETS)
def test_recomputation(name):
    rules = TARGETS[name].rules
    never = every_stage({"recompute": "never"})
    plan = change(make_plan(name), never)
    some = change(plan, {1: {"recompute": "always"}})
    expected = "recomputation of some stages" if rules.recompute else "recomputation"
    assert "never" in rejected(some, name)[expected].remedy
    for mode in ("always", "except_last"):
        if mode not in rules.recompute:
            every = change(plan, every_stage({"recompute": mode}))
            assert "recomputation" in rejected(every, name)


@pytest.mark.parametrize("name", TARGETS)
def test_replicas_that_share_their_weights(name):
    for strategy in ("zero1", "fully_shard"):
        plan = change(make_plan(name), {0: {"strategy": strategy}})
        found = rejected(plan, name)["sharded replicas"]
        assert strategy in found.reason
        assert found.remedy == "strategies='replicate'"


@pytest.mark.parametrize("name", TARGETS)
def test_layers_split_over_devices(name):
    plan = change(make_plan(name), {1: {"tensor": 2, "devices": ("a", "b")}})
    assert rejected(plan, name)["split layers"].remedy == "tensor=1"


@pytest.mark.parametrize("name", TARGETS)
def test_modules_that_two_stages_call(name):
    names = ("drop", *NAMES[1:-1], "drop@1")
    found = rejected(make_plan(name, names=names), name)["a module of two stages"]
    assert "stages 0 and 3 call 'drop'" in found.reason
    assert found.remedy == "together='drop,drop@1'"


@pytest.mark.parametrize("name", select(lambda rules: rules.unit == "layer"))
def test_values_that_skip_a_stage(name):
    """Those that cut between any layers hand on what the last layer of a stage returned."""
    from tests.builders import boundary

    same = tuple(boundary(after, forward_bytes=4) for after in range(3))
    found = rejected(make_plan(name, boundaries=same), name)["values that skip a stage"]
    assert "'hidden' crosses two cuts" in found.reason


@pytest.mark.parametrize("name", TARGETS)
def test_order_of_layers(name):
    plan = make_plan(name, layer_order=tuple(reversed(range(11))))
    assert rejected(plan, name)["order of layers"].remedy == "layer_order='given'"


@pytest.mark.parametrize("name", select(lambda rules: not rules.direct_sends))
def test_direct_sends(name):
    send = DirectSend(source=0, target=2, tensors=("skip",))
    plan = make_plan(name, direct_sends=(send,))
    assert "'skip'" in rejected(plan, name)["direct sends"].reason


@pytest.mark.parametrize("name", select(lambda rules: not (rules.tied_weights or rules.inference)))
def test_weights_of_two_stages(name):
    """Where links take no time, neither do the sums of gradients, so the weights are named."""
    weight = Parameter(names=("embed.weight", "lm_head.weight"), size_bytes=4, layers=(0, 10))
    for plan in (make_plan(name, tied_sync_time_s=1e-3), make_plan(name, shared_weights=(weight,))):
        assert rejected(plan, name)["tied weights"].remedy == "tied='together'"
    assert "embed.weight" in rejected(plan, name)["tied weights"].reason


def test_weights_that_deepspeed_cannot_be_told_of():
    weight = Parameter(names=("embed.weight", "lm_head.weight"), size_bytes=4, layers=(0, 10))
    assert (
        "{0: 'weight', 10: 'weight'}"
        in export(make_plan("deepspeed", shared_weights=(weight,)), "deepspeed").text
    )
    second = Parameter(names=("embed.bias", "norm.bias"), size_bytes=4, layers=(0, 9))
    elsewhere = weight.model_copy(update={"names": ("embed.weight",)})
    for shared in ((weight, second), (elsewhere,)):
        plan = make_plan("deepspeed", shared_weights=shared)
        assert rejected(plan, "deepspeed")["tied weights"].remedy == "tied='together'"
    # Edited by hand: the time of the sums, but not the weights.
    edited = make_plan("deepspeed", tied_sync_time_s=1e-3)
    assert "share a weight" in rejected(edited, "deepspeed")["tied weights"].reason


@pytest.mark.parametrize("name", select(lambda rules: rules.chain))
def test_models_that_are_no_chain_of_modules(name):
    broken = make_plan(name, chain_break="operation 'relu' belongs to no layer's module")
    with pytest.raises(Inexpressible) as error:
        export(broken, name)
    assert "no chain of modules: operation 'relu'" in str(error.value)
    assert f"--for {name}" not in str(error.value), "no options help"
    # A profile may leave it open.
    found = rejected(make_plan(name, chain_break=None), name)["chain of modules not known"]
    assert found.remedy.startswith("profile the model again")
    assert export(make_plan(name), name).text


@pytest.mark.parametrize(
    "name", select(lambda rules: "1f1b" in rules.schedules and not rules.own_depths)
)
def test_more_micro_batches_in_flight_than_1f1b_has(name):
    plan = make_plan(name, schedule="1f1b")
    deeper = change(plan, {1: {"in_flight": plan.stages[1].in_flight + 1}})
    assert "max_extra_in_flight=0" in rejected(deeper, name)["micro-batches in flight"].remedy


@pytest.mark.parametrize("name", BLOCKS)
def test_cuts_inside_blocks(name):
    pieces = ("embed", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "layers.2", "head")
    rejection = rejected(make_plan(name, (0, 3, 6), pieces), name)["cut inside a block"]
    assert "'layers.1'" in rejection.reason
    assert rejection.remedy == "no_cut_after='layers.1.attention'"


@pytest.mark.parametrize("name", select(lambda rules: rules.unit == "module"))
def test_cuts_inside_modules(name):
    called_again = ("embed", "layers.0", "layers.1", "layers.0@1", "layers.1@1", "head")
    plan = make_plan(name, (0, 3, 6), called_again)
    assert "'layers.0@1'" in rejected(plan, name)["cut inside a module"].reason


@pytest.mark.parametrize("name", BLOCKS)
def test_cuts_outside_the_blocks(name):
    cases = [((0, 5, 10, 11), "behind")]
    if not TARGETS[name].rules.cuts_around_blocks:
        cases.append(((0, 1, 5, 11), "before"))
    if not (TARGETS[name].rules.cuts_around_blocks or TARGETS[name].rules.cuts_behind_blocks):
        cases.append(((0, 5, 9, 11), "behind"))
    for cuts, word in cases:
        assert word in rejected(make_plan(name, cuts), name)["cut outside the blocks"].reason


@pytest.mark.parametrize("name", BLOCKS)
def test_models_without_one_stack_of_blocks(name):
    stacks = ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    plan = make_plan(name, (0, 2, 4), stacks, chain_break="the model takes 2 inputs")
    found = rejected(plan, name)["no blocks"]
    assert "2 stacks" in found.reason
    assert "torch, deepspeed, torchgpipe, pipedream need no blocks" in found.reason
    blockless = select(lambda rules: rules.unit != "block")
    assert list(WITHOUT_BLOCKS) == blockless, "those that are named"


def test_a_sequential_without_blocks_is_cut_for_accelerate():
    names = ("0", "1", "2", "3.0", "3.1")
    kinds = ("Conv2d", "ReLU", "Flatten", "Linear", "ReLU")
    plan = make_plan("accelerate", (0, 2, 5), names)
    plan = change(plan, {0: {"layer_types": kinds[:2]}, 1: {"layer_types": kinds[2:]}})
    scope = {}
    exec(export(plan, "accelerate").text, scope)
    assert scope["device_map"] == {"0": 0, "1": 0, "2": 1, "3.0": 1, "3.1": 1}
    assert scope["split_points"] == ["2"]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_between_the_embedding_and_the_head_of_a_sequential(name):
    """They were refused, as their numbers do not begin at 0."""
    kinds = ("Embedding", *["Block"] * 6, "LayerNorm", "Linear")
    names = tuple(map(str, range(9)))
    plan = make_plan(name, (0, 4, 9), names)
    stages = {
        index: {
            "layer_types": kinds[first:last],
            "module_fqns": tuple(
                f"{at}.mlp" if kinds[at] == "Block" else str(at) for at in range(first, last)
            ),
        }
        for index, (first, last) in enumerate(((0, 4), (4, 9)))
    }
    plan = change(plan, stages)
    layers = ModelLayers.of(plan)
    assert (layers.stack.num_blocks, layers.stack.name(0)) == (6, "1")
    text = export(plan, name).text
    assert import_cut(text, name, layers).balance == (4, 5), text
    if name == "accelerate":
        scope = {}
        exec(text, scope)
        assert scope["device_map"] == {str(at): int(at > 3) for at in range(9)}
    if name == "torchtitan":
        assert '["0", "1", "2", "3"]' in text


@pytest.mark.parametrize("name", BLOCKS)
def test_numbered_modules_that_do_not_repeat(name):
    """A Sequential of convolutions and activations counted as a stack of decoder blocks."""
    names = tuple(map(str, range(6)))
    kinds = ("Conv2d", "ReLU") * 3
    plan = make_plan(name, (0, 2, 6), names, chain_break="operation 'add' belongs to no module")
    typed = {0: {"layer_types": kinds[:2]}, 1: {"layer_types": kinds[2:]}}
    reason = rejected(change(plan, typed), name)["no blocks"].reason
    assert "no repeated blocks: '0' is Conv2d, '1' ReLU" in reason
    # Blocks that hold modules may differ, as those of a hybrid model do.
    inside = {
        index: {**update, "module_fqns": tuple(f"{each}.inner" for each in names[2 * index :])}
        for index, update in typed.items()
    }
    inside[0]["module_fqns"] = ("0.inner", "1.inner")
    hybrid = change(plan, inside)
    if TARGETS[name].rules.equal_blocks:
        assert set(rejected(hybrid, name)) == {"unequal stages"}
    else:
        assert export(hybrid, name).text


def test_what_torchgpipe_takes_only_once():
    """Its GPipe raises for a module or a weight in two places, whatever the balance."""
    import torchgpipe
    from torch import nn

    names = ("first", "act", "second", "act@1", "third")
    shared = Parameter(names=("first.weight", "second.weight"), size_bytes=4, layers=(0, 1))
    first, second, act = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()
    tied = nn.Linear(2, 2)
    tied.weight = first.weight
    for plan, layers in (
        (make_plan("torchgpipe", (0, 4, 5), names), (first, act, second, act, nn.Linear(2, 2))),
        (make_plan("torchgpipe", shared_weights=(shared,)), (first, tied)),
    ):
        assert "no module or weight twice" in rejected(plan, "torchgpipe")["shared modules"].reason
        with pytest.raises(ValueError, match="duplicate"):
            torchgpipe.GPipe(nn.Sequential(*layers), [len(layers)], devices=["cpu"])


def test_accelerate_places_every_name_of_a_weight():
    shared = Parameter(names=("embed.weight", "tied_head.weight"), size_bytes=4, layers=(0, 1))
    scope = {}
    exec(export(make_plan("accelerate", shared_weights=(shared,)), "accelerate").text, scope)
    assert scope["device_map"]["tied_head"] == scope["device_map"]["embed"] == 0


def test_unequal_stages_of_maxtext():
    plan = make_plan("maxtext", (0, 2, 5, 7, 11))
    assert "[1, 3, 2, 2]" in rejected(plan, "maxtext")["unequal stages"].reason


def test_values_that_skip_a_stage_under_a_v_in_torch():
    from tests.builders import boundary

    plan = make_plan("torch", schedule="zbv")
    same = tuple(boundary(after, forward_bytes=4) for after in range(3))
    skipping = plan.model_copy(update={"boundaries": same})
    assert "'hidden'" in rejected(skipping, "torch")["values that skip a stage"].reason


def interleaved(places, chunks, **changes):
    names = tuple(f"layers.{index}" for index in range(places * chunks))
    cuts = list(range(len(names) + 1))
    rules = TargetRules("block")
    plan = build_plan(names, cuts, "interleaved_1f1b", chunks, random.Random(1), rules)
    return change(plan, **changes)


def test_virtual_stages_of_one_rank():
    assert "virtual stages of one rank" in rejected(interleaved(1, 3), "megatron")
    found = rejected(interleaved(4, 2, num_microbatches=9), "megatron")
    assert "multiple of 4" in found["micro-batches of virtual stages"].remedy
