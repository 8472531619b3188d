"""Runtimes that have no build for CPUs: their rules, rewritten from the files named, agree."""

import json
import random
import re
from itertools import accumulate, pairwise

import numpy as np
import pytest

from stagewright.core.profile.block_stack import find_stack
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import ModelLayers, count_blocks
from tests.formats.runtimes.random_plans import draw_plan

NUM_PLANS = 1000


def draw_plans(name):
    draw = random.Random(f"rule of {name}")
    return [draw_plan(draw, TARGETS[name].rules) for _ in range(NUM_PLANS)]


def ranges(plan):
    ends = list(accumulate(count_blocks(plan), initial=0))
    return list(pairwise(ends))


def pp_indices(value, num_layers, rank, ranks):
    """vllm/distributed/utils.py of vLLM 0.33.0 and srt/distributed/utils.py of SGLang 0.5.23.

    Both take as many whole numbers as ranks, which have to add up to the hidden layers.
    """
    counts = list(map(int, value.split(",")))
    assert len(counts) == ranks
    assert sum(counts) == num_layers
    return sum(counts[:rank]), sum(counts[: rank + 1])


@pytest.mark.parametrize(
    ("name", "variable"),
    [("vllm", "VLLM_PP_LAYER_PARTITION"), ("sglang", "SGLANG_PP_LAYER_PARTITION")],
)
def test_layer_partitions_give_each_rank_its_stage(name, variable):
    for plan in draw_plans(name):
        text = export(plan, name).text
        (value,) = re.findall(rf"^export {variable}=(.*)$", text, re.MULTILINE)
        (ranks,) = re.findall(r"--(?:pipeline-parallel|pp)-size (\d+)", text)
        blocks = find_stack(plan.layer_names).num_blocks
        found = [pp_indices(value, blocks, rank, int(ranks)) for rank in range(int(ranks))]
        assert found == ranges(plan)


def test_default_splits_are_those_of_the_runtimes():
    """vLLM spares the last rank, which has the head; SGLang gives the last ones more."""
    assert TARGETS["vllm"].default_split(40, 3) == (13, 14, 13)
    assert TARGETS["vllm"].default_split(43, 4) == (11, 11, 11, 10)
    assert TARGETS["sglang"].default_split(40, 3) == (13, 13, 14)
    assert TARGETS["tensorrt-llm"].default_split(40, 3) == (14, 13, 13)
    assert list(TARGETS["tensorrt-llm"].default_split(40, 3)) == [
        len(part) for part in np.array_split(range(40), 3)
    ]


def test_tensorrt_llm_and_colossalai_have_lists_that_add_up():
    """pp_partition: tensorrt_llm pull request 9003; num_layers_per_stage: stage_manager.py, 0.5.0.

    The former has an entry for each pipeline rank, the latter for each stage of each chunk; both
    add up to the layers.
    """
    for plan in draw_plans("tensorrt-llm"):
        text = export(plan, "tensorrt-llm").text
        settings = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
        counts = json.loads(settings["pp_partition"])
        assert len(counts) == int(settings["pipeline_parallel_size"]) == plan.num_stages
        assert sum(counts) == find_stack(plan.layer_names).num_blocks
        assert counts == list(count_blocks(plan))
    for plan in draw_plans("colossalai"):
        made = {}
        text = export(plan, "colossalai").text.replace("from colossalai", "# from colossalai")
        exec(text, {"HybridParallelPlugin": lambda made=made, **given: made.update(given)})
        assert len(made["num_layers_per_stage"]) == made["pp_size"] * made["num_model_chunks"]
        assert made["num_layers_per_stage"] == list(count_blocks(plan))
        assert (made["num_model_chunks"] > 1) == (made["pp_style"] != "1f1b")


def test_maxtext_has_equal_stages():
    """configs/base.yml at e591f30c: layers = stages x layers per stage x repeats."""
    for plan in draw_plans("maxtext"):
        text = export(plan, "maxtext").text
        settings = {key: int(value) for key, value in re.findall(r"^(\w+): (\d+)$", text, re.M)}
        share = settings["num_layers_per_pipeline_stage"]
        places, repeats = settings["ici_pipeline_parallelism"], settings["num_pipeline_repeats"]
        assert share * places * repeats == find_stack(plan.layer_names).num_blocks
        assert set(count_blocks(plan)) == {share}


def place_units(shares, num_blocks):
    """``load_tensors`` of src/llama-model.cpp at 5815cb84, in float32 as there.

    Cumulative shares are divided by their sum; unit i, of the blocks and the output behind them,
    goes to the first device whose share exceeds i / (blocks + 1).
    """
    splits = np.cumsum(np.array(shares, np.float32), dtype=np.float32)
    splits = (splits / splits[-1]).astype(np.float32)
    units = np.arange(num_blocks + 1, dtype=np.float32) / np.float32(num_blocks + 1)
    return np.searchsorted(splits, units, side="right")


def test_llama_cpp_places_every_block_on_its_stage():
    for plan in draw_plans("llama.cpp"):
        text = export(plan, "llama.cpp").text
        (shares,) = re.findall(r"--tensor-split ([\d,]+)", text)
        stack = find_stack(plan.layer_names)
        devices = place_units(list(map(int, shares.split(","))), stack.num_blocks)
        counts = np.bincount(devices[:-1], minlength=plan.num_stages)
        assert counts.tolist() == list(count_blocks(plan))
        assert devices[-1] == plan.num_stages - 1, "the output"
        assert "-fit off" in text
        assert "leaves 90 B of 100 B" in text
        # Four sequences of 128 tokens in each micro-batch.
        sequences = 4 * plan.num_microbatches
        assert f"-c {128 * sequences} -np {sequences}\n" in text


def test_llama_cpp_shares_of_any_proportion_are_read_by_its_rule():
    draw = random.Random(7)
    for _ in range(NUM_PLANS):
        num_blocks = draw.randint(2, 80)
        shares = [draw.randint(1, 24) for _ in range(draw.randint(1, 6))]
        names = ("embed", *(f"layers.{index}" for index in range(num_blocks)), "head")
        cut = import_cut(f"-ts {','.join(map(str, shares))}", "llama.cpp", ModelLayers(names))
        placed = place_units(shares, num_blocks).tolist()
        used = sorted(set(placed))
        assert [sum("layers" in names[layer] for layer in stage) for stage in cut.stages] == [
            placed[:-1].count(device) for device in used
        ]


def test_pipedream_maps_every_module_to_its_ranks():
    """runtime.py of msr-fiddle/pipedream: modules in order, the loss last, ranks of each stage."""
    for plan in draw_plans("pipedream"):
        document = json.loads(export(plan, "pipedream").text)
        stages, ranks = document["module_to_stage_map"], document["stage_to_rank_map"]
        assert len(stages) == plan.num_stages + 1
        assert stages[-1] == stages[-2], "the loss runs with the last stage"
        flat = [rank for stage in range(plan.num_stages) for rank in ranks[str(stage)]]
        assert flat == list(range(sum(stage.replicas for stage in plan.stages)))
        assert [len(ranks[str(s)]) for s in stages[:-1]] == [s.replicas for s in plan.stages]
