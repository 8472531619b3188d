"""What is exported to a target and read back is the plan's cut."""

import random

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import ModelLayers
from tests.formats.runtimes.random_plans import draw_plan

NUM_PLANS = 1000

SAYS_MICROBATCHES = set(TARGETS) - {"vllm", "sglang", "tensorrt-llm", "llama.cpp", "pipedream"}
"""Targets whose form has the micro-batches of a step."""


@pytest.mark.parametrize("name", TARGETS)
def test_an_imported_export_is_the_plan(name):
    target = TARGETS[name]
    draw = random.Random(name)
    several = 0
    for _ in range(NUM_PLANS):
        plan = draw_plan(draw, target.rules)
        several += plan.num_stages > 2
        text = export(plan, name).text
        assert plan.content_id().partition("_")[2] in text
        cut = import_cut(text, name, ModelLayers.of(plan))
        assert cut.balance == plan.balance, text
        # Megatron's data parallelism follows from its processes, so it is in no flag.
        replicas = tuple(stage.replicas for stage in plan.stages)
        given = (1,) * len(replicas) if name == "megatron" else replicas
        assert (cut.replicas or (1,) * len(replicas)) == given
        if name in SAYS_MICROBATCHES:
            assert cut.num_microbatches == plan.num_microbatches
        modes = {stage.recompute for stage in plan.stages}  # without a block a stage has no layers
        assert cut.recompute in (None, "layers" if "layers" in modes else modes.pop())
        if cut.schedule is not None:
            assert (cut.schedule, cut.chunks) == (plan.schedule, plan.chunks)
    assert several > NUM_PLANS / 4


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "nonsense",
        "[",
        "{",
        "[[[",
        "{'a': [}",
        "-1,2",
        "1,2,x",
        "#",
        "0x10",
        "\0",
        "9" * 400,
    ],
)
def test_other_text_is_refused(name, text):
    layers = ModelLayers(("embed", *(f"layers.{index}" for index in range(8)), "norm", "lm_head"))
    with pytest.raises(InvalidInput):
        import_cut(text, name, layers)


def test_an_unknown_target_is_refused_with_a_suggestion():
    with pytest.raises(InvalidInput, match="did you mean 'megatron'"):
        import_cut("x", "megatrn", ModelLayers(("layers.0",)))


def test_text_without_end_is_not_read():
    with pytest.raises(InvalidInput, match="characters"):
        import_cut("1," * 2**20, "vllm", ModelLayers(("layers.0", "layers.1")))
    with pytest.raises(InvalidInput, match="letters"):
        import_cut("E((t*99999)*99999)*99999L", "megatron", ModelLayers(("layers.0", "layers.1")))
