"""Two ranks that make, use and close pipeline after pipeline; print JSON lines."""

from __future__ import annotations

import copy
import gc
import operator
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import SPECS, Case, traced_profile

MICROBATCHES = 3
Counts = tuple[int, int, int]


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


def one_rank() -> None:
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
    used = [after_use(model, plans, batch)]
    used += [after_use(model, plans, batch, used[0]) for _ in range(2)]
    report(used=used)
    report(refused=refused(sample))  # last: after an error groups stay
    dist.destroy_process_group()


class Averaging(nn.Module):
    """Keeps an average of what it has seen, and normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach().mean(0), 0.5)
        return self.linear(self.norm(x) - self.seen)


def refused(sample: Tensor) -> list[str]:
    """What two replicas of a stage say whose forward moves a buffer: in a step, in evaluation."""
    torch.manual_seed(0)
    model, mse_loss = Averaging().double(), nn.functional.mse_loss
    case = Case("averaging", SPECS["mlp"], model, (sample,), mse_loss)
    profile = traced_profile(case)
    plan = plan_from_balance(
        profile,
        Cluster.uniform(2),
        PlanOptions(num_microbatches=2),
        [len(profile.layers)],
        replicas=(2,),
    )
    found = []
    batch = torch.cat([sample, sample])
    with DistributedPipeline(model, plan, loss_fn=mse_loss) as pipeline:
        for call in (lambda: pipeline.step(batch, target=batch), lambda: pipeline.evaluate(batch)):
            try:
                call()
            except InvalidInput as error:
                found.append(str(error))
    return found


def worst(model: nn.Module, plan: Plan, batch: Tensor) -> float:
    """The largest difference of any output from the unsplit model's."""
    with DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn) as pipeline:
        output, _ = pipeline.evaluate(batch)
    if output is None:
        return 0.0
    pairs = zip(output, model(batch), strict=True)
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def after_use(
    model: nn.Module, plans: list[Plan], batch: Tensor, before: Counts | None = None
) -> Counts:
    """Open files, threads and process groups once every plan has taken a step.

    On a busy machine gloo's threads end, and close their files, a moment after the pipelines.
    """
    for plan in plans:
        with DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn) as pipeline:
            pipeline.step(batch, target=torch.zeros(len(batch), 4, dtype=torch.float64))
        del pipeline
    gc.collect()
    deadline = time.monotonic() + 10
    while before and time.monotonic() < deadline and any(map(operator.gt, counts(), before)):
        time.sleep(0.05)
    return counts()


def counts() -> Counts:
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups


def report(**found: object) -> None:
    print_line({"rank": dist.get_rank(), **found})


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_forked(2, one_rank)
