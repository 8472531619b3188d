"""Under autocast the backward takes each operation's dtype from its forward, and casts nothing.

It ran inside autocast too: gradients of what a model keeps in float32 were computed in bfloat16.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from tests.torch_models import SPECS, Case, traced_profile

MICROBATCHES = 2


class InSinglePrecision(nn.Module):
    """A region that is kept out of the autocast around it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_gradients_are_those_of_a_backward_outside_of_autocast(alone, recompute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), InSinglePrecision(), nn.Linear(64, 2))
    loss_fn = nn.functional.mse_loss
    case = Case("mixed", SPECS["mlp"], model, (torch.randn(8, 64),), loss_fn)
    with torch.autocast("cpu", torch.bfloat16):
        profile = traced_profile(case)
    options = PlanOptions(num_microbatches=MICROBATCHES, recompute=recompute)
    plan = plan_from_balance(profile, Cluster.uniform(1), options, [len(profile.layers)])
    batch, target = torch.randn(8 * MICROBATCHES, 64), torch.randn(8 * MICROBATCHES, 2)
    with DistributedPipeline(
        copy.deepcopy(model), plan, loss_fn=loss_fn, autocast=torch.bfloat16
    ) as pipeline:
        pipeline.step(batch, target=target)
        found = dict(pipeline.module.named_parameters())
    pieces = zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    for piece, wanted in pieces:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(piece), wanted) / MICROBATCHES
        loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_difference(found[name].grad, parameter.grad) <= 1e-6, name
