"""Ranks: models under mixed plans against the unsplit model, three steps, saved and resumed."""

from __future__ import annotations

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stagewright.capture.capture import trace
from stagewright.core.plan.plan import Plan
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.keyed_dropout import keyed_dropout
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.schedules.plan_schedule import count_ranks
from tests.runtime.forked import print_line, run_forked
from tests.runtime.larger import larger
from tests.runtime.tensor_parallel.models import Example, make_example
from tests.runtime.tensor_parallel.plans import Mix, write_plan

STEPS, SAVED, MICROBATCHES, MAX_NORM = 3, 2, 4, 0.05


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(parameters)}], lr=1e-2)


def train_unsplit(example: Example, seed: int | None) -> dict[str, Any]:
    """Train the unsplit model; return losses, norms and the weights after every step."""
    model = copy.deepcopy(example.model)
    if example.name == "mixtral":  # torch's grouped products know no double precision in eager mode
        model.set_experts_implementation("batched_mm")
    layers = trace(model, example.sample, check=False)
    segment = layers.segment(0, len(layers.layers)) if seed is not None else None
    optimizer = make_optimizer(model.parameters())
    found: dict[str, Any] = {"losses": [], "norms": [], "state": []}
    for step in range(STEPS):
        batch, target = example.draw_batch(MICROBATCHES, seed=step)
        total = 0.0
        for index in range(MICROBATCHES):
            inputs = {name: value.chunk(MICROBATCHES)[index] for name, value in batch.items()}
            wanted = target.chunk(MICROBATCHES)[index]
            if segment is None:
                output = model(**inputs)
            else:
                with keyed_dropout(segment, seed=seed, step=step, microbatch=index):
                    output = layers.unflatten_output(segment(*inputs.values()))
            loss = example.loss_fn(output, wanted) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(total)
        found["norms"].append(float(norm))
        found["state"].append({k: v.clone() for k, v in model.state_dict().items()})
    return found


def read_whole(pipeline: DistributedPipeline) -> dict[str, Tensor]:
    """Return this rank's weights, whole; called on every rank that shares its stages."""
    found = {}
    for name, value in pipeline.module.state_dict().items():
        local = value.full_tensor() if isinstance(value, DTensor) else value
        split = pipeline.split
        if split is not None and pipeline.grid.widths[pipeline.schedule_rank] > 1:
            division = split.divided.get(name)
            if division is not None:
                local = split.group.join(local, division.layout)
        found[name] = local
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    apart = (float((value - expected[name]).abs().max()) for name, value in found.items())
    return functools.reduce(larger, apart, 0.0)


def run(
    example: Example,
    plan: Plan,
    expected: dict[str, Any],
    seed: int | None,
    begin: int,
    folder: Path,
) -> dict[str, Any]:
    """Train under a plan, from a checkpoint if ``begin`` is not 0."""
    members = list(range(count_ranks(plan)))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return {}
    pipeline = DistributedPipeline(
        copy.deepcopy(example.model), plan, loss_fn=example.loss_fn, keyed_dropout=seed, group=group
    )
    optimizer = pipeline.optimizer(torch.optim.AdamW, lr=1e-2)
    if begin:
        load_checkpoint(folder, pipeline, optimizer)
    worst = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    for step in range(begin, STEPS):
        batch, target = example.draw_batch(MICROBATCHES, seed=step)
        loss = pipeline.step(**batch, target=target)
        norm = float(pipeline.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            worst["loss"] = larger(worst["loss"], abs(float(loss) - expected["losses"][step]))
        worst["norm"] = larger(worst["norm"], abs(norm - expected["norms"][step]))
        whole = difference(read_whole(pipeline), expected["state"][step])
        worst["weight"] = larger(worst["weight"], whole)
        if not begin and step + 1 == SAVED:
            save_checkpoint(folder, pipeline, optimizer, step=step + 1)
    split = pipeline.split
    count = 0 if split is None else len(split.divided)
    elements = sum(
        value.numel() for state in optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )  # fmt: skip
    total = sum(parameter.numel() for parameter in pipeline.module.parameters())
    pipeline.close()
    dist.destroy_process_group(group)
    return {**worst, "divided": count, "state_elements": elements, "elements": total}


def one_rank(
    cases: list[tuple[Example, Any, Any, list[Mix]]], seed: int | None, folder: Path
) -> None:
    init_process_group(backend="gloo", timeout_s=120)
    for example, captured, expected, mixes in cases:
        previous = None
        for number, mix in enumerate(mixes):
            plan = write_plan(captured, mix, MICROBATCHES)
            own = folder / f"{example.name}-{number}"
            for begin in (0, SAVED) if previous is not None else (0,):
                found = run(example, plan, expected, seed, begin, previous if begin else own)
                if found:
                    print_line(
                        {"model": example.name, "mix": str(mix), "begin": begin,
                         "rank": dist.get_rank(), **found}
                    )  # fmt: skip
                dist.barrier()
            previous = own
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Importing torch and tracing is done once, before forking."""
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    seed = asked.get("seed")
    cases = []
    for name, mixes in asked["cases"].items():
        example = make_example(name, dropout=asked.get("dropout", 0.0))
        captured = trace(example.model, example.sample, check=False)
        expected = train_unsplit(example, seed)
        cases.append((example, captured, expected, [Mix(*each) for each in mixes]))
    run_forked(4, functools.partial(one_rank, cases, seed, Path(asked["folder"])))


if __name__ == "__main__":
    main()
