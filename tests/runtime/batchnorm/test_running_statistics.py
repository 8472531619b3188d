"""Running statistics move as a loop over micro-batches moves them, or as the whole batch does."""

import copy

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.batchnorm.running_statistics import RunningStatistics
from stagewright.runtime.engine.emulated_ranks import EmulatedCollective, SynchronisationPoint


def normed(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=momentum)).double()


def step(model, statistics, batches):
    statistics.begin()
    for index, batch in enumerate(batches):
        with statistics.of(index):
            model(batch)
    statistics.share()
    if (found := statistics.finish()) is not None:
        flags, check = found
        check(flags.tolist())


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(count, 4, 3, dtype=torch.float64, generator=generator)
    return [3 * part + 1 for part in draw]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_micro_batches_move_them_one_after_the_other(momentum):
    model = normed(momentum)
    expected = copy.deepcopy(model)
    statistics = RunningStatistics(model, "microbatch", 3, 1, None)
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
    statistics = RunningStatistics(model, "deferred", 3, 1, None)
    assert statistics.is_needed
    for seed in range(2):
        step(model, statistics, batches(3, seed))
        expected(torch.cat(batches(3, seed)))
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, msg=name)


def test_a_backward_may_come_after_the_next_forward():
    """Moving statistics must not look like a change to what autograd has saved."""
    model = normed()
    statistics = RunningStatistics(model, "deferred", 2, 1, None)
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
        step(model, RunningStatistics(model, "deferred", 2, 1, None), batches(2, 0))


def test_frozen_statistics_stay():
    model = normed()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    step(model, RunningStatistics(model, "deferred", 2, 1, None), batches(2, 0))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def instance_normed(momentum=0.1):
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(3, momentum=momentum, track_running_stats=True)
    return nn.Sequential(nn.Conv1d(3, 3, 1), norm).double()


def images(count):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, 2, 3, 5, dtype=torch.float64, generator=generator))


def same_buffers(model, expected):
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(
            dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_normalisation_has_a_rule_of_its_own(momentum):
    """It was moved as batch normalisation is: it counts no batches, its variance is a mean."""
    model = instance_normed(momentum)
    expected = copy.deepcopy(model)
    parts = images(4)
    step(model, RunningStatistics(model, "deferred", 4, 1, None), parts)
    expected(torch.cat(parts))
    same_buffers(model, expected)
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("build", [normed, instance_normed])
def test_replicas_move_them_as_one_device_would(build):
    model = build()
    expected = copy.deepcopy(model)
    parts = batches(5, 0) if build is normed else images(5)
    replicas = [copy.deepcopy(model) for _ in range(3)]
    meeting = SynchronisationPoint(3)
    statistics = [
        RunningStatistics(replica, "microbatch", 5, 3, EmulatedCollective(meeting, place))
        for place, replica in enumerate(replicas)
    ]
    for own in statistics:
        own.begin()
    for number, part in enumerate(parts):
        expected(part)
        with statistics[number % 3].of(number):
            replicas[number % 3](part)
    for own in statistics:
        own.share()
    for own in statistics:
        own.finish()
    for replica in replicas:
        same_buffers(replica, expected)


def test_a_module_that_is_held_and_not_called_stays():
    model = normed()
    spare = nn.BatchNorm1d(2).double()
    model[0].spare = spare
    before = copy.deepcopy(spare.state_dict())
    step(model, RunningStatistics(model, "deferred", 2, 1, None), batches(2, 0))
    assert all(torch.equal(spare.state_dict()[name], value) for name, value in before.items())


def test_a_module_that_only_some_replicas_call_is_refused_by_all():
    """Each knows of its own micro-batches, in all or none of which the module ran."""
    replicas = [normed(), normed()]
    meeting = SynchronisationPoint(2)
    statistics = [
        RunningStatistics(replica, "microbatch", 4, 2, EmulatedCollective(meeting, place))
        for place, replica in enumerate(replicas)
    ]
    for own in statistics:
        own.begin()
    for number, part in enumerate(batches(4, 0)):
        with statistics[number % 2].of(number):
            replicas[number % 2][0](part) if number % 2 else replicas[0](part)
    for own in statistics:
        own.share()
    for own in statistics:
        flags, check = own.finish()
        with pytest.raises(InvalidInput, match="1 runs in only some micro-batches of a step"):
            check(flags.tolist())
