"""Three ranks that train on batches of a `PipelineLoader`; the last one prints each loss.

With ``seeds`` instead of ``losses`` as argument, one rank has another seed, and each rank prints
the error it ends with.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stagewright.core.errors import PlanMismatch
from stagewright.data import PipelineLoader
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import make_case, make_plan

RANKS, SAMPLES, EPOCHS = 3, 40, 2


class Part(Dataset[Tensor]):
    """Inputs or targets; refuses to load on a rank whose stages do not use them."""

    def __init__(self, values: Tensor, is_used: bool) -> None:
        self.values, self.is_used = values, is_used

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        assert self.is_used
        return self.values[index]


def make_data() -> tuple[Tensor, Tensor]:
    """Return all inputs and all targets."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 64, generator=generator)
    return inputs, torch.randint(0, 10, (SAMPLES,), generator=generator)


def train() -> None:
    rank = int(os.environ["RANK"])
    init_process_group(backend="gloo", timeout_s=60)
    case, (inputs, targets) = make_case("mlp"), make_data()
    plan = make_plan(case, RANKS, num_microbatches=2)
    seed = 1 if sys.argv[1] == "seeds" and rank == 1 else 0
    with DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as pipeline:
        parts = Part(inputs, rank == 0), Part(targets, rank == RANKS - 1)
        try:
            loader = PipelineLoader(pipeline, *parts, seed=seed)
        except PlanMismatch as error:
            print_line({"rank": rank, "error": str(error)})
            return
        optimizer = pipeline.optimizer(torch.optim.SGD, lr=0.1)
        for epoch in range(EPOCHS):
            for batch, target in loader.epoch(epoch):
                loss = pipeline.step(*batch, target=target)
                optimizer.step()
                optimizer.zero_grad()
                if loss is not None:
                    print_line({"loss": float(loss)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_forked(RANKS, train)
