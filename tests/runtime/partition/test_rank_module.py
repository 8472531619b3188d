"""All stages of a rank as one module."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright import DistributedPipeline
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.measure.profile import profile

WIDTH, MICROBATCHES = 4, 2


class Average(nn.Module):
    """Puts a new tensor in place of its buffer, and the old one into the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.average
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_buffers_that_modules_replace_are_those_of_now(recompute):
    """A state_dict of a rank with several stages held the buffers of the beginning."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(Average(), Average()), torch.randn(2 * MICROBATCHES, WIDTH)
    options = PlanOptions(
        num_microbatches=MICROBATCHES, schedule="interleaved_1f1b", recompute=recompute
    )
    plan = plan_from_balance(profile(model, batch[:2]), "1xcpu", options, [1, 1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pipeline = DistributedPipeline(
            copy.deepcopy(model), plan, loss_fn=lambda output, target: output.square().mean()
        )
        pipeline.step(batch, target=batch)
        found = pipeline.module.state_dict()
        pipeline.close()
    finally:
        dist.destroy_process_group()
    for part in batch.chunk(MICROBATCHES):
        model(part)
    torch.testing.assert_close(found, model.state_dict(), rtol=0, atol=0)
