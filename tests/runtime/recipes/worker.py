"""Ranks that follow the recipes of ``examples/recipes``, compared with the unsplit model."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import stagewright
from tests.runtime.forked import print_line, run_forked
from tests.runtime.larger import larger

FOLDER = Path(__file__).parents[3] / "examples" / "recipes"
MESH = "class_parallel --data"
UPDATES = 3

Recipe = dict[str, Any]


def take_part(whole: Tensor, part: Tensor, shard: int) -> Tensor:
    """Return a rank's piece of a tensor that is cut in equal ones along one dimension."""
    dims = [d for d, size in enumerate(part.shape) if size != whole.shape[d]]
    if not dims:
        return whole
    (dim,) = dims
    pieces = whole.chunk(whole.shape[dim] // part.shape[dim], dim)
    return pieces[shard % len(pieces)]


def train(recipe: Recipe, plan: stagewright.Plan) -> dict[str, Any]:
    """Return the largest differences of losses and gradients, and how weights are held."""
    options = recipe.get("OPTIONS", {})
    accumulate = options.get("accumulate", 1)
    unsplit = recipe["build_model"]()
    worst = {"loss": 0.0, "gradient": 0.0}
    size = plan.num_microbatches * plan.inputs[0].shape[0]
    with stagewright.build(
        plan, recipe["build_model"](), loss_fn=cross_entropy, **options
    ) as training:
        ours = training.optimizer(torch.optim.AdamW, lr=1e-2)
        theirs = torch.optim.AdamW(unsplit.parameters(), lr=1e-2)
        held = {"divided": 0, "sharded": 0, "whole": 0}
        for step in range(UPDATES * accumulate):
            torch.manual_seed(100 + step)
            batch = torch.randn(size, *plan.inputs[0].shape[1:], dtype=torch.float64)
            target = torch.randint(0, 8, (size,))
            loss = training.step(batch, target=target)
            expected = cross_entropy(unsplit(batch), target)
            (expected / accumulate).backward()
            if loss is not None:
                worst["loss"] = larger(worst["loss"], abs(float(loss - expected.detach())))
            if (step + 1) % accumulate == 0:
                wanted = {name: p.grad for name, p in unsplit.named_parameters()}
                for name, parameter in training.named_parameters():
                    gradient = parameter.grad
                    kind = "whole"
                    if isinstance(gradient, DTensor):
                        kind, gradient = "sharded", gradient.full_tensor()
                    elif gradient.shape != wanted[name].shape:
                        kind = "divided"
                    part = take_part(wanted[name], gradient, dist.get_rank())
                    apart = float((gradient - part).abs().max())
                    worst["gradient"] = larger(worst["gradient"], apart)
                    held[kind] += step < accumulate
                theirs.step()
                theirs.zero_grad()
            training.update(ours)
    return {**worst, **held}


def serve(recipe: Recipe, plan: stagewright.Plan) -> dict[str, Any]:
    """Return the largest difference of outputs, which must come in order."""
    unsplit = recipe["build_model"]()
    torch.manual_seed(7)
    batches = [torch.randn(4, 16, dtype=torch.float64) for _ in range(12)]
    worst = 0.0
    with stagewright.DistributedInferencePipeline(recipe["build_model"](), plan) as pipeline:
        if pipeline.rank == 0:
            alone = [pipeline.submit(batch).result() for batch in batches[:3]]
            outputs = [*alone, *pipeline.map(batches[3:])]
            with torch.no_grad():
                expected = [unsplit(batch) for batch in batches]
            pairs = zip(outputs, expected, strict=True)
            apart = (float((a - b).abs().max()) for a, b in pairs)
            worst = functools.reduce(larger, apart)
    return {"output": worst}


def follow(name: str, ranks: int, recipe: Recipe, plan: stagewright.Plan) -> None:
    stagewright.init_process_group(backend="gloo", timeout_s=60)
    found = (serve if name == "stages_in_order" else train)(recipe, plan)
    print_line({"recipe": name, "ranks": ranks, "rank": dist.get_rank(), **found})
    dist.barrier()
    dist.destroy_process_group()


def run_script(name: str, arguments: list[str]) -> None:
    """Run a recipe as torchrun does, and report the differences it prints."""
    sys.argv = [name, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    found = [float(number) for number in re.findall(r"(\S+) apart$", said.getvalue(), re.M)]
    if found:
        print_line(
            {
                "recipe": name,
                "ranks": 4,
                "printed": len(found),
                "apart": functools.reduce(larger, found),
            }
        )


def make_plan(name: str, recipe: Recipe, ranks: int) -> stagewright.Plan:
    make: Callable[..., stagewright.Plan] = recipe["make_plan"]
    return make(ranks, 2) if name == MESH else make(ranks)


def main() -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    for name in json.loads(sys.argv[1]):
        script, *arguments = name.split()
        recipe = runpy.run_path(str(FOLDER / f"{script}.py"))
        for ranks in (2, 4):
            plan = make_plan(name, recipe, ranks)
            run_forked(ranks, functools.partial(follow, name, ranks, recipe, plan))
        given = [*arguments, "2"] if arguments else []
        run_forked(4, functools.partial(run_script, script, given))


if __name__ == "__main__":
    main()
