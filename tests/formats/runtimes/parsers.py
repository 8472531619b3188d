"""Questions to the parsers of other runtimes, answered in a process that has them.

``python parsers.py QUESTION`` with a JSON list of cases on standard input; `.runtimes` is on its
path. The answers go to standard output, one for each case, as JSON.
"""

import json
import sys
from typing import Any

import torch
from torch import nn


def ask_megatron(case: dict[str, Any]) -> list[list[str]]:
    """Return the layer types of each stage, in model order, after Megatron's own validation."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout(case["layout"], case["ranks"])
    layout.validate_layer_layout(case["num_layers"], 0)
    chunks = layout.virtual_pipeline_model_parallel_size
    # Stage index = chunk * ranks + rank.
    return [
        [kind.name for kind in layout.layout[rank][chunk]]
        for chunk in range(chunks)
        for rank in range(case["ranks"])
    ]


def ask_megatron_accepts(case: dict[str, Any]) -> bool:
    """Return whether Megatron's validation accepts a layout with as many layers as it has."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        layout = PipelineParallelLayerLayout(case["layout"], case["ranks"])
        layout.validate_layer_layout(case["layout"].count("t"), case["layout"].count("m"))
    except AssertionError:
        return False
    return True


def ask_megatron_builds(case: dict[str, Any]) -> list[int] | None:
    """Return the layers of each stage that Megatron builds by its flags; `None` if it stops."""
    from types import SimpleNamespace

    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = SimpleNamespace(pipeline_model_parallel_layout=None, **case)
    chunks = case["virtual_pipeline_model_parallel_size"]
    try:
        return [
            get_num_layers_to_build(config, None if chunks is None else chunk, rank)
            for chunk in range(chunks or 1)
            for rank in range(case["pipeline_model_parallel_size"])
        ]
    except AssertionError:
        return None


def ask_torchtitan(case: dict[str, Any]) -> list[list[str]]:
    """Return the layers that torchtitan's _split_module leaves in each model part."""
    from torchtitan.distributed.pipeline_parallel import _split_module

    model = nn.Module()
    for name in case["edges"]:
        model.add_module(name, Numbered(name))
    prefix = case["prefix"]
    blocks = (Numbered(f"{prefix}.{index}") for index in range(case["num_blocks"]))
    model.add_module(prefix, nn.ModuleList(blocks))
    parts = (_split_module(model, part) for part in case["parts"])
    return [[m.name for m in part.modules() if isinstance(m, Numbered)] for part in parts]


def ask_torchtitan_default(case: dict[str, Any]) -> list[int]:
    """Return the numbers of decoder layers of torchtitan's own split, with its default weights."""
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    parts = _generate_llm_fqn_per_model_part(case["num_stages"], case["num_blocks"], 1, 1)
    return [sum(name.startswith("layers.") for name in part) for part in parts]


def ask_deepspeed(case: dict[str, Any]) -> list[list[int]]:
    """Return the bounds of each stage that the exported class gives DeepSpeed's own method."""
    scope: dict[str, Any] = {}
    exec(case["text"], scope)
    bounds = []
    for stage in range(case["num_stages"]):
        module = scope["PlannedPipelineModule"].__new__(scope["PlannedPipelineModule"])
        nn.Module.__init__(module)
        module._topo, module.global_rank = OneStage(stage), stage
        module._layer_specs = [None] * case["num_layers"]
        module._partition_layers()
        bounds.append([module._local_start, module._local_stop])
    return bounds


def ask_deepspeed_default(case: dict[str, Any]) -> list[int]:
    """Return the bounds of DeepSpeed's partition_method "parameters" for numbers of parameters."""
    from deepspeed.runtime.utils import partition_balanced

    return list(map(int, partition_balanced(case["weights"], case["num_stages"])))


def ask_deepspeed_method(case: dict[str, Any]) -> list[int]:
    """Return the parts of DeepSpeed's own method, for layers of given classes and parameters."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule.__new__(PipelineModule)
    nn.Module.__init__(module)
    module._topo, module.global_rank, module.num_stages = OneStage(0), 0, case["num_stages"]
    module.loss_fn, module._layer_specs = None, []
    for kind, weights in zip(case["types"], case["weights"], strict=True):
        layer = type(kind, (nn.Module,), {})()
        layer.weight = nn.Parameter(torch.empty(weights, device="meta"))
        layer.frozen = nn.Parameter(torch.empty(9999, device="meta"), requires_grad=False)
        module._layer_specs.append(layer)
    module._partition_layers(case["method"])
    return list(map(int, module.parts))


class Numbered(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class OneStage:
    """A topology in which a rank is the stage of its number."""

    def __init__(self, stage: int) -> None:
        self.pipe = stage

    def get_coord(self, rank: int) -> "OneStage":
        assert rank == self.pipe
        return self


QUESTIONS = {
    "megatron": ask_megatron,
    "megatron accepts": ask_megatron_accepts,
    "megatron builds": ask_megatron_builds,
    "torchtitan": ask_torchtitan,
    "torchtitan's default": ask_torchtitan_default,
    "deepspeed": ask_deepspeed,
    "deepspeed's methods": ask_deepspeed_method,
    "deepspeed's default": ask_deepspeed_default,
}

if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr
    ask = QUESTIONS[sys.argv[1]]
    json.dump([ask(case) for case in json.load(sys.stdin)], stdout)
