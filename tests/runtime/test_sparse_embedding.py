"""nn.Embedding(sparse=True): its gradients stay sparse, or are refused where they cannot be."""

import copy

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.planner.plan import plan
from stagewright.profiler.measure.profile import profile
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from stagewright.runtime.verify import mean_of_squares, verify


def square(output, target):
    return ((output - target) ** 2).mean()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8, sparse=True)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, ids):
        return self.blocks(self.tokens(ids).mean(1))


def draw(size):
    return torch.randint(0, 20, (size, 5))


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    return profile(Tokens(), draw(2), options=ProfilingOptions(budget_s=0.05))


def test_clipped_and_updated_by_sparse_adam_as_in_eager(measured):
    torch.manual_seed(0)
    model, ids, target = Tokens(), draw(4), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    made = plan(measured, "2x8GB", PlanOptions(num_stages=2), num_microbatches=2)
    training = Training(Pipeline(model, made), loss_fn=square, max_norm=0.01)
    training.step(ids, target=target)
    square(eager(ids), target).backward()
    eager.tokens.weight.grad = eager.tokens.weight.grad.coalesce()
    norms = [parameter.grad.to_dense().norm() for parameter in eager.parameters()]
    total = torch.stack(norms).norm()
    assert total > 0.01
    for parameter in eager.parameters():
        parameter.grad.mul_(0.01 / (total + 1e-6))
    assert model.tokens.weight.grad.is_sparse
    for net, update in (
        (model, training.update),
        (eager, lambda *all_of: [o.step() for o in all_of]),
    ):
        update(
            torch.optim.SparseAdam(net.tokens.parameters()),
            torch.optim.SGD(net.blocks.parameters(), 1),
        )
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


def test_verified_without_replicas_and_refused_with_them(measured):
    alone = plan(measured, "2x8GB", PlanOptions(num_stages=2), num_microbatches=2)
    assert verify(Tokens(), alone, draw(4), torch.zeros(4), mean_of_squares).worst < 1e-5
    options = PlanOptions(num_stages=1, max_replicas=2)
    twice = plan(measured, "2x8GB", options, num_microbatches=2)
    assert twice.stages[0].replicas == 2
    with pytest.raises(InvalidInput, match=r"'tokens.weight' are sparse.*2 ranks.*sparse=False"):
        verify(Tokens(), twice, draw(4), torch.zeros(4), mean_of_squares)
