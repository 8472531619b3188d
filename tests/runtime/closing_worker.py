"""One of two ranks that makes, uses and closes pipeline after pipeline; prints JSON lines."""

from __future__ import annotations

import copy
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.core.cluster import Cluster
from stagewright.core.plan import Plan, PlanOptions
from stagewright.planner.from_balance import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.process_group import init_process_group
from tests.torch_models import SPECS, Case, traced_profile

MICROBATCHES = 3


class Strided(nn.Module):
    """Its outputs are views with gaps, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.second(self.first(x).relu())
        return found[:, -1], found.transpose(1, 2), (found > 0)[..., ::2]


def loss_fn(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], target)


def main() -> None:
    torch.set_num_threads(1)
    init_process_group(backend="gloo", timeout_s=60)
    torch.manual_seed(0)
    model = Strided().double()
    sample = torch.randn(2, 3, 4, dtype=torch.float64)
    case = Case("strided", SPECS["mlp"], model, (sample,), loss_fn)
    profile = traced_profile(case)
    layers = len(profile.layers)
    cuts = ([layers - 1, 1], ()), ([layers], (2,))
    plans = [
        plan_from_balance(
            profile,
            Cluster.uniform(2),
            PlanOptions(num_microbatches=MICROBATCHES),
            balance,
            replicas=replicas,
        )
        for balance, replicas in cuts
    ]
    batch = torch.randn(2 * MICROBATCHES, 3, 4, dtype=torch.float64)
    for plan in plans:
        report(evaluated=worst(model, plan, batch))
    used = [after_use(model, plans, batch) for _ in range(3)]
    report(used=used)
    dist.destroy_process_group()


def worst(model: nn.Module, plan: Plan, batch: Tensor) -> float:
    """The largest difference of any output from the unsplit model's."""
    with DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn) as pipeline:
        output, _ = pipeline.evaluate(batch)
    if output is None:
        return 0.0
    pairs = zip(output, model(batch), strict=True)
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def after_use(model: nn.Module, plans: list[Plan], batch: Tensor) -> tuple[int, int, int]:
    """Open files, threads and process groups once every plan has taken a step."""
    for plan in plans:
        with DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn) as pipeline:
            pipeline.step(batch, target=torch.zeros(len(batch), 4, dtype=torch.float64))
        del pipeline
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups


def report(**found: object) -> None:
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
