"""Exports are read by the parsers of the runtimes themselves, where `make runtimes` put them."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.profile.block_stack import find_stack
from stagewright.formats.runtimes.megatron import check_interleaving
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import ModelLayers, TargetRules, count_blocks
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


def draw_flags(draw):
    """Return settings of megatron-core, and the same as the flags of a script."""
    ranks = draw.choice([1, 2, 3, 4, 8])
    given = draw.random() < 0.5
    chunks = draw.choice([None, None, 2, 3]) if ranks > 1 else None
    case = {
        "num_layers": max(
            1, ranks * (chunks or 1) * draw.randint(1, 6) + draw.choice([0, 0, 1, -2])
        ),
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": chunks,
        "num_layers_in_first_pipeline_stage": draw.randint(1, 6) if given else None,
        "num_layers_in_last_pipeline_stage": draw.randint(1, 6) if given and ranks > 1 else None,
        "account_for_embedding_in_pipeline_split": draw.random() < 0.3,
        "account_for_loss_in_pipeline_split": draw.random() < 0.3,
    }
    flags = {
        "num-layers": case["num_layers"],
        "num-virtual-stages-per-pipeline-rank": chunks,
        "decoder-first-pipeline-num-layers": case["num_layers_in_first_pipeline_stage"],
        "decoder-last-pipeline-num-layers": case["num_layers_in_last_pipeline_stage"],
    }
    words = [f"--{name} {value}" for name, value in flags.items() if value is not None]
    words += [
        f"--{name.replace('_', '-')}" for name in case if name.startswith("account") and case[name]
    ]
    return case, f"PP={ranks}\npretrain_gpt.py --pipeline-model-parallel-size $PP {' '.join(words)}"


@needs_runtimes
def test_flags_without_a_layout_give_the_stages_that_megatron_builds():
    draw = random.Random(11)
    drawn = [draw_flags(draw) for _ in range(NUM_PLANS)]
    answers = ask("megatron builds", [case for case, _ in drawn])
    stopped = lost = 0
    for (case, text), built in zip(drawn, answers, strict=True):
        blocks = (f"layers.{index}" for index in range(case["num_layers"]))
        layers = ModelLayers(("e", *blocks, "h"))
        # Megatron's configuration refuses more layers on an end than there are before this rule.
        # Without a rank between the two ends Megatron builds what they are told, lost or not.
        if built is None or min(built) < 0:
            stopped += 1
            with pytest.raises(InvalidInput):
                import_cut(text, "megatron", layers)
            continue
        found = import_cut(text, "megatron", layers)
        if sum(built) > case["num_layers"]:
            assert found.excess.startswith(f"the stages have {sum(built)} blocks")
            continue
        counts = [sum("layers" in layers.names[at] for at in stage) for stage in found.stages]
        assert counts == built, (case, text)
        assert len(found.missing) == case["num_layers"] - sum(built)
        lost += bool(found.missing)
    assert 200 < stopped < 800
    assert lost


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


def draw_method(draw):
    """Return a DeepSpeed script with what its method reads, and the model's layers."""
    size = draw.randint(2, 24)
    types = tuple(draw.choice(["Embedding", "Block", "BlockNorm", "Linear"]) for _ in range(size))
    weights = tuple(draw.choice([0, 1, 5, 5, 12, draw.randint(0, 99)]) for _ in range(size))
    pattern = draw.choice([types[0], "block", "BLOCK|Linear", r"norm$", "^b.o"])
    method = draw.choice(["uniform", "parameters", "Parameters", f"type:{pattern}"])
    case = {"types": types, "weights": weights, "num_stages": draw.randint(1, 8), "method": method}
    text = f"PipelineModule(layers=layers, num_stages={case['num_stages']}"
    if method != "parameters" or draw.random() < 0.5:
        text += f', partition_method="{method}"'
    names = tuple(f"layer.{index}" for index in range(size))
    return case, f"{text})", ModelLayers(names, types, parameter_counts=weights)


@needs_runtimes
def test_deepspeed_partitions_by_its_methods_as_we_compute():
    draw = random.Random(29)
    drawn, unfit, empty = [], 0, 0
    while len(drawn) < NUM_PLANS:
        case, text, layers = draw_method(draw)
        fits = re.compile(case["method"].removeprefix("type:"), re.IGNORECASE).search
        if case["method"].startswith("type:") and not any(map(fits, case["types"])):
            unfit += 1
            with pytest.raises(InvalidInput, match="no layer has a type that fits"):
                import_cut(text, "deepspeed", layers)
        elif case["method"].lower() == "parameters" and not any(case["weights"]):
            continue
        else:
            drawn.append((case, text, layers))
    answers = ask("deepspeed's methods", [case for case, _, _ in drawn])
    for (case, text, layers), parts in zip(drawn, answers, strict=True):
        cut = import_cut(text, "deepspeed", layers)
        assert list(accumulate(cut.balance, initial=0)) == parts, case
        assert f"parts computed as {parts}" in " ".join(cut.notes)
        empty += 0 in cut.balance
    assert unfit
    assert empty > 20


def check_left_out(draw, plan, root, device_map):
    """Leave an entry out; a layer counts as missing where Accelerate refuses the map."""
    from accelerate.utils.modeling import check_device_map

    kept = dict(device_map)
    name = draw.choice([*kept])
    del kept[name]
    if not kept:
        return
    under = [at for at, each in enumerate(plan.layer_names) if f"{each}.".startswith(f"{name}.")]
    bare = draw.random() < 0.5
    saved = []
    for module in root.get_submodule(name).modules():
        if bare and "weight" in module._parameters:  # its buffers are not in the state_dict
            saved.append((module, module._parameters.pop("weight")))
            module.register_buffer("table", saved[-1][1].data, persistent=False)
    covered = {device_map[each] for each in kept} == set(device_map.values())
    layers = replace(ModelLayers.of(plan), weightless=frozenset(under * bare))
    text = f"device_map = {kept}"
    refused = False
    try:
        check_device_map(root, kept)
    except ValueError:
        refused = True
    if covered:
        cut = import_cut(text, "accelerate", layers)
        assert bool(cut.missing) == refused, (plan.layer_names, name)
        assert set(cut.missing) <= set(under)
        assert bool(cut.notes) == bare
    for module, weight in saved:
        del module.table
        module.register_parameter("weight", weight)


def test_accelerate_finds_every_parameter_in_the_device_map():
    """On the meta device: a model of modules with the plan's names, a weight in each."""
    draw = random.Random(8)
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
        check_left_out(draw, plan, root, scope["device_map"])
        for index, stage in enumerate(plan.stages):
            for name in stage.layer_names:
                held = [key for key in scope["device_map"] if f"{name}.".startswith(f"{key}.")]
                assert {scope["device_map"][key] for key in held} == {index}


def test_torch_splits_before_the_modules_and_validates_the_order_of_work(monkeypatch):
    """Its own annotate_split_points marks the cuts, and _validate_schedule reads the CSV."""
    from torch import nn
    from torch.distributed.pipelining import _IR, SplitPoint
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    calls = []
    monkeypatch.setattr(_IR, "pipe_split", lambda: calls.append(None))
    for plan in draw_plans("torch"):
        exported = export(plan, "torch")
        [spec] = re.findall(r"SPLIT_SPEC = (\{.*?\})", exported.text, re.DOTALL)
        root = nn.Module()
        for index, name in enumerate(plan.layer_names):
            module = root
            for part in name.split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.forward = partial(calls.append, index)
        _IR.annotate_split_points(root, eval(spec, {"SplitPoint": SplitPoint}))
        calls.clear()
        for name in plan.layer_names:
            root.get_submodule(name)()
        ends = [at for at, call in enumerate([*calls, None]) if call is None]
        counts = [end - start - 1 for start, end in pairwise([-1, *ends])]
        assert counts == list(plan.balance)
        rows = exported.attachments["schedule.csv"].splitlines()
        actions = {
            rank: [_Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(rows)
        }
        of_stage = _validate_schedule(actions, len(rows), plan.num_stages, plan.num_microbatches)
        assert len(of_stage) == plan.num_stages


def test_torchgpipe_splits_by_the_balance():
    import torch
    from torch import nn
    from torchgpipe.gpipe import split_module

    for plan in draw_plans("torchgpipe"):
        scope = {}
        exec(export(plan, "torchgpipe").text, scope)
        names = {str(index): nn.Identity() for index in range(len(plan.layer_names))}
        devices = [torch.device("cpu")] * plan.num_stages
        parts, *_ = split_module(nn.Sequential(OrderedDict(names)), scope["balance"], devices)
        held = [[int(name) for name, _ in part.named_children()] for part in parts]
        ends = list(accumulate(plan.balance, initial=0))
        assert held == [list(range(*pair)) for pair in pairwise(ends)]


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
