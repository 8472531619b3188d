"""Exports are read by the parsers of the runtimes themselves, where `make runtimes` put them."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import tomllib
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagewright.core.profile.block_stack import find_stack
from stagewright.formats.runtimes.megatron import check_interleaving
from stagewright.formats.runtimes.registry import TARGETS, export
from stagewright.formats.target import TargetRules, count_blocks
from tests.formats.runtimes.random_plans import build_plan, draw_plan

ROOT = Path(__file__).resolve().parents[3]
RUNTIMES = ROOT / ".runtimes"
NUM_PLANS = 1000

needs_runtimes = pytest.mark.skipif(not RUNTIMES.is_dir(), reason="make runtimes installs them")


def draw_plans(name):
    draw = random.Random(f"own parser of {name}")
    return [draw_plan(draw, TARGETS[name].rules) for _ in range(NUM_PLANS)]


def ask(question, cases):
    """Have the runtime's own code answer, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(RUNTIMES), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("parsers.py"), question],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_runtimes
def test_megatron_builds_the_stages_of_the_plan():
    plans = draw_plans("megatron")
    cases = []
    for plan in plans:
        text = export(plan, "megatron").text
        (layout,) = re.findall(r"--pipeline-model-parallel-layout '(.*)'", text)
        (ranks,) = re.findall(r"--pipeline-model-parallel-size (\d+)", text)
        num_layers = find_stack(plan.layer_names).num_blocks
        cases.append({"layout": layout, "ranks": int(ranks), "num_layers": num_layers})
    for plan, stages in zip(plans, ask("megatron", cases), strict=True):
        assert [stage.count("decoder") for stage in stages] == list(count_blocks(plan))
        assert stages[0][0] == "embedding"
        assert stages[-1][-1] == "loss"


@needs_runtimes
def test_torchtitan_leaves_each_part_the_layers_of_its_stage():
    plans = draw_plans("torchtitan")
    cases = []
    for plan in plans:
        settings = tomllib.loads(export(plan, "torchtitan").text)["parallelism"]
        parts = settings["module_fqns_per_model_part"]
        stack = find_stack(plan.layer_names)
        is_own = stack.prefix in ("layers", "blocks")
        edges = ["tok_embeddings", "norm", "lm_head"]
        if is_own:
            edges = [*plan.layer_names[: stack.starts[0]], *plan.layer_names[stack.end :]]
        prefix = stack.prefix if is_own else "layers"
        cases.append(
            {"parts": parts, "prefix": prefix, "edges": edges, "num_blocks": stack.num_blocks}
        )
    for plan, case, stages in zip(plans, cases, ask("torchtitan", cases), strict=True):
        blocks = [[name for name in stage if name.startswith(case["prefix"])] for stage in stages]
        assert list(map(len, blocks)) == list(count_blocks(plan))
        assert [name for part in blocks for name in part] == [
            f"{case['prefix']}.{index}" for index in range(case["num_blocks"])
        ]
        edges = [[name for name in stage if name in case["edges"]] for stage in stages]
        assert sorted(name for part in edges for name in part) == sorted(case["edges"])
        assert case["edges"][0] in edges[0]
        assert case["edges"][-1] in edges[-1]


@needs_runtimes
def test_torchtitan_splits_by_default_as_we_say():
    cases = [
        {"num_blocks": blocks, "num_stages": stages}
        for blocks in (4, 7, 16, 32, 61)
        for stages in (1, 2, 3, 4, 5)
    ]
    split = TARGETS["torchtitan"].default_split
    expected = [list(split(case["num_blocks"], case["num_stages"])) for case in cases]
    assert ask("torchtitan's default", cases) == expected


@needs_runtimes
def test_deepspeed_sets_the_bounds_of_each_stage():
    plans = draw_plans("deepspeed")
    cases = [
        {
            "text": export(plan, "deepspeed").text,
            "num_stages": plan.num_stages,
            "num_layers": len(plan.layer_names),
        }
        for plan in plans
    ]
    for plan, bounds in zip(plans, ask("deepspeed", cases), strict=True):
        assert bounds == [list(pair) for pair in pairwise(accumulate(plan.balance, initial=0))]


def test_accelerate_finds_every_parameter_in_the_device_map():
    """On the meta device: a model of modules with the plan's names, a weight in each."""
    import torch
    from accelerate.utils.modeling import check_device_map
    from torch import nn

    for plan in draw_plans("accelerate"):
        root = nn.Module()
        for name in plan.layer_names:
            module = root
            for part in name.split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter("weight", nn.Parameter(torch.empty(1, device="meta")))
        scope: dict[str, dict[str, int]] = {}
        exec(export(plan, "accelerate").text, scope)
        check_device_map(root, scope["device_map"])
        for index, stage in enumerate(plan.stages):
            for name in stage.layer_names:
                held = [key for key in scope["device_map"] if f"{name}.".startswith(f"{key}.")]
                assert {scope["device_map"][key] for key in held} == {index}


@needs_runtimes
def test_virtual_stages_run_the_micro_batches_that_megatron_runs():
    """Its schedule's own checks are run, cut out of its source."""
    source = (RUNTIMES / "megatron/core/pipeline_parallel/schedules.py").read_text()
    names = ("config.microbatch_group_size_per_vp_stage > num_microbatches", "raise RuntimeError(")
    first, last = (source.index(name) for name in names)
    lines = source[source.rindex("if (", 0, first) - 4 : source.index("\n", last)]
    code = compile(textwrap.dedent(lines), "schedules.py", "exec")
    runs = set()
    for places, group, count in product((2, 3, 4), (None, 2, 3, 5), range(1, 17)):
        own = {
            "config": SimpleNamespace(microbatch_group_size_per_vp_stage=group or places),
            "num_microbatches": count,
            "pipeline_parallel_size": places,
        }
        expected = True
        try:
            exec(code, own)
        except (ValueError, RuntimeError):
            expected = False
        runs.add(expected)
        layers = tuple(f"layers.{index}" for index in range(2 * places))
        cuts, rules = list(range(2 * places + 1)), TargetRules("block")
        plan = build_plan(layers, cuts, "interleaved_1f1b", 2, random.Random(1), rules)
        plan = plan.model_copy(update={"num_microbatches": count})
        assert (not check_interleaving(plan, group)) == expected, (places, group, count)
    assert runs == {True, False}
