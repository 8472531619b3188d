"""Three ranks of which one was given something else; prints what each rank was told.

Called with the names of `DIFFERENCES`, whose ranks all run at once: they wait more than they work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stagewright.core.errors import StagewrightError
from stagewright.core.plan.plan import Plan
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import exit_codes, fork_ranks, print_line
from tests.torch_models import Case, make_plan

RANKS, VICTIM, SAMPLES = 3, 1, 8
MANY_STEPS = 200


class Scale(nn.Module):
    """Looks the same whatever its weight's shape and its helper."""

    def __init__(self, size: int = 4, helper: Callable[[Tensor], Tensor] = torch.neg) -> None:
        super().__init__()
        self.scale, self.helper = nn.Parameter(torch.ones(size)), helper

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x) * self.scale


class Net(nn.Module):
    """Traced, so that what `Scale` calls is in the graph."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), Scale(**options)
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.scale(self.first(x))))


@dataclass(frozen=True)
class Given:
    """Arguments of one rank."""

    model: nn.Module
    plan: Plan
    batch: Tensor
    target: Tensor


def give_shuffled(given: Given) -> Given:
    return replace(given, batch=given.batch.flip(0))


def give_shuffled_target(given: Given) -> Given:
    return replace(given, target=given.target.flip(0))


def give_half(given: Given) -> Given:
    return replace(given, batch=given.batch[: SAMPLES // 2])


def give_other_shapes(given: Given) -> Given:
    return replace(given, model=Net(size=1))


def give_other_code(given: Given) -> Given:
    return replace(given, model=Net(helper=double_negative))


def double_negative(x: Tensor) -> Tensor:
    return -torch.neg(torch.neg(x))


def give_fewer_micro_batches(given: Given) -> Given:
    return replace(given, plan=plan_for(given.model, SAMPLES // 4))


DIFFERENCES = {
    "samples": give_shuffled,
    "targets": give_shuffled_target,
    "half a batch": give_half,
    "shapes": give_other_shapes,
    "code": give_other_code,
    "micro-batches": give_fewer_micro_batches,
}


def plan_for(model: nn.Module, num_microbatches: int) -> Plan:
    sample = (torch.ones(SAMPLES // num_microbatches, 4),)
    case = Case("net", None, model, sample, nn.functional.mse_loss)
    return make_plan(case, RANKS, num_microbatches=num_microbatches)


def usual() -> Given:
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(SAMPLES, 4)
    return Given(model, plan_for(model, 4), batch, torch.randn(SAMPLES, 4))


def train(name: str, given: Given) -> None:
    group = init_process_group(backend="gloo", timeout_s=30)
    rank = torch.distributed.get_rank(group)
    if rank == VICTIM:
        given = DIFFERENCES[name](given)
    said = "trained on"
    try:
        loss_fn = nn.functional.mse_loss
        with DistributedPipeline(given.model, given.plan, loss_fn=loss_fn) as pipeline:
            for _ in range(MANY_STEPS):
                pipeline.step(given.batch, target=given.target)
    except StagewrightError as error:
        said = f"{type(error).__name__}: {error}"
    print_line({"difference": name, "rank": rank, "said": said})


def main() -> None:
    torch.set_num_threads(1)
    given = usual()
    started = [fork_ranks(RANKS, functools.partial(train, name, given)) for name in sys.argv[1:]]
    codes = [code for ranks in started for code in exit_codes(ranks).values()]
    if any(codes):
        sys.exit(f"exit codes of ranks: {codes}")


if __name__ == "__main__":
    main()
