"""Plans that recompute block by block, in the forms of runtimes that do."""

import re

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.formats.expressible import Inexpressible
from stagewright.formats.plan_for import plan_for
from stagewright.formats.runtimes.registry import export, import_cut
from stagewright.formats.target import ModelLayers
from stagewright.planner.price_split import plan_from_balance
from tests.builders import chain_profile

MIB = 2**20
FLAGS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def block_profile(*, saved_by_head=0):
    """An embedding and a head that save little, and six blocks between them."""
    costs = chain_profile([0.01] * 8, parameter_bytes=MIB, forward_bytes=MIB, saved_bytes=16 * MIB)
    names = ("embed_tokens", *(f"layers.{at}" for at in range(6)), "lm_head")
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(costs.layers, names, strict=True)
    )
    storages = list(costs.storages)
    for at, size in ((0, 0), (7, saved_by_head)):
        storages[at] = storages[at].model_copy(update={"size_bytes": size})
    return costs.model_copy(update={"layers": layers, "storages": tuple(storages)})


def plan_layers(profile):
    options = PlanOptions(num_microbatches=4, recompute="layers")
    return plan_from_balance(profile, "2x1GB", options, [4, 4])


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_it_is_written_and_read(target):
    profile = block_profile()
    made = export(plan_layers(profile), target)
    text = str(made)
    if target == "megatron":
        assert FLAGS in re.sub(r" *\\\n", " ", text)
        assert 'recompute_granularity="full"' in text
    else:
        assert '[activation_checkpoint]\nmode = "full"' in text
    cut = import_cut(text, target, ModelLayers.of(profile))
    assert cut.recompute == "layers"
    assert not [note for note in cut.notes if "not read" in note]
    never = plan_from_balance(profile, "2x1GB", PlanOptions(num_microbatches=4), [4, 4])
    without = str(export(never, target))
    assert not re.search("recompute|activation_checkpoint", without)
    assert import_cut(without, target, ModelLayers.of(profile)).recompute is None


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_other_layers_than_blocks_are_refused(target):
    made = plan_layers(block_profile(saved_by_head=16 * MIB))
    assert (7, 8) in made.stages[1].checkpoints
    with pytest.raises(Inexpressible, match="other layers than each of the blocks recompute"):
        export(made, target)


def test_a_runtime_without_it_refuses_it():
    with pytest.raises(Inexpressible, match="recompute their activations by layer"):
        export(plan_layers(block_profile()), "torchgpipe")
    options = PlanOptions(schedule="gpipe", num_microbatches=4, recompute="layers")
    with pytest.raises(InvalidInput, match="is not told which layers recompute"):
        plan_for("torchgpipe", block_profile(), "2x1GB", options)


def test_auto_takes_it_where_nothing_else_fits():
    options = PlanOptions(num_microbatches=4, recompute="auto")
    roomy = plan_for("megatron", block_profile(), "2x1GB", options)
    assert {stage.recompute for stage in roomy.plan.stages} == {"never"}
    tight = plan_for("megatron", block_profile(), "2x80MB", options)
    assert {stage.recompute for stage in tight.plan.stages} == {"layers"}


def test_some_recomputed_layers_of_megatron_are_not_read():
    text = (
        "--pipeline-model-parallel-layout 'Ettt|tttL' --recompute-granularity selective "
        "--recompute-num-layers 1"
    )
    cut = import_cut(text, "megatron", ModelLayers.of(block_profile()))
    assert cut.recompute is None
    assert "--recompute-granularity selective" in " ".join(cut.notes)
