"""Running statistics move as a loop over micro-batches moves them, or as the whole batch does."""

import copy

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.batch_statistics import RunningStatistics


def normed(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=momentum)).double()


def step(model, statistics, batches):
    statistics.begin()
    for index, batch in enumerate(batches):
        with statistics.of(index):
            model(batch)
    statistics.finish()


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(count, 4, 3, dtype=torch.float64, generator=generator)
    return [3 * part + 1 for part in draw]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_micro_batches_move_them_one_after_the_other(momentum):
    model = normed(momentum)
    expected = copy.deepcopy(model)
    statistics = RunningStatistics(model, "microbatch", 3, 1, 0, None)
    assert not statistics.is_needed  # the modules do it themselves
    for seed in range(2):
        step(model, statistics, batches(3, seed))
        for batch in batches(3, seed):
            expected(batch)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, msg=name)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_ones_move_as_by_the_whole_batch(momentum):
    model = normed(momentum)
    expected = copy.deepcopy(model)
    statistics = RunningStatistics(model, "deferred", 3, 1, 0, None)
    assert statistics.is_needed
    for seed in range(2):
        step(model, statistics, batches(3, seed))
        expected(torch.cat(batches(3, seed)))
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, msg=name)


def test_a_backward_may_come_after_the_next_forward():
    """Moving statistics must not look like a change to what autograd has saved."""
    model = normed()
    statistics = RunningStatistics(model, "deferred", 2, 1, 0, None)
    statistics.begin()
    losses = []
    for index, batch in enumerate(batches(2, 0)):
        with statistics.of(index):
            losses.append(model(batch).square().sum())
    statistics.finish()
    for loss in losses:
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_module_used_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.norm(x))

    model = Twice().double()
    with pytest.raises(InvalidInput, match="norm is used 2 times"):
        step(model, RunningStatistics(model, "deferred", 2, 1, 0, None), batches(2, 0))


def test_frozen_statistics_stay():
    model = normed()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    step(model, RunningStatistics(model, "deferred", 2, 1, 0, None), batches(2, 0))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
