"""Balancing, asked as torchgpipe is asked."""

import inspect
import itertools

import pytest
import torch
import torchgpipe.balance
from torch import nn

from stagewright.torchgpipe import skip
from stagewright.torchgpipe.balance import balance_by_size, balance_by_time, blockpartition, profile


class Clock:
    """Time that passes when a layer says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


class Work(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock = clock
        self.seconds = iter(seconds)

    def forward(self, x):
        self.clock.now += next(self.seconds)
        return x

    def __deepcopy__(self, memo):
        return self


class Grow(nn.Module):
    """Leaves a number of tensors of the input's size behind."""

    def __init__(self, count, size=1):
        super().__init__()
        self.count = count
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        for _ in range(self.count):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


def test_signatures_are_torchgpipes():
    for name in ("balance_by_time", "balance_by_size"):
        ours = inspect.signature(globals()[name]).parameters
        theirs = inspect.signature(getattr(torchgpipe.balance, name)).parameters
        assert [(p.name, p.kind) for p in ours.values()] == [
            (p.name, p.kind) for p in theirs.values()
        ]
        for key in theirs.keys() - {"device"}:
            assert ours[key].default == theirs[key].default


def test_blocks_of_a_sequence():
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert blockpartition.solve([0, 0], partitions=2) == [[0], [0]]
    assert blockpartition.solve([3, 1]) == [[3, 1]]
    for sequence, partitions in (([42], 0), ([42], -1), ([], 1), ([42], 2)):
        with pytest.raises(ValueError, match="partitions"):
            blockpartition.solve(sequence, partitions=partitions)


def test_the_largest_block_is_never_larger_than_torchgpipes():
    smaller = 0
    for sequence in itertools.product((1, 4, 9), repeat=6):
        ours, theirs = (
            max(map(sum, module.solve(list(sequence), 3)))
            for module in (blockpartition, torchgpipe.balance.blockpartition)
        )
        assert ours <= theirs
        smaller += ours < theirs
    assert smaller


def test_by_time(monkeypatch):
    """The median of the rounds after the first; torchgpipe adds all up."""
    clock = Clock()
    monkeypatch.setattr(profile, "time", clock)
    usual = [(9, i, i, 10 * i) for i in (1, 2, 3, 4, 5)]
    layers = nn.Sequential(*[Work(clock, seconds) for seconds in (*usual, (9, 90, 6, 6))])
    assert balance_by_time(2, layers, torch.rand(1), timeout=250, device="cpu") == [4, 2]


def test_layers_are_measured_in_training_and_left_alone():
    class Look(nn.Module):
        def forward(self, x):
            assert self.training
            return x

    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Look()).eval()
    sample = torch.rand(2, 3, 8, 8, requires_grad=True)
    assert sum(balance_by_time(2, model, sample, timeout=0.05)) == 3
    assert not any(module.training for module in model.modules())
    assert model[1].num_batches_tracked == 0
    assert sample.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_with_gradients_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model(torch.rand(1, 3, 8, 8)).norm().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, model, torch.rand(1, 3, 8, 8), device="cpu")


def test_tuples_pass_between_layers():
    class Swap(nn.Module):
        def forward(self, pair):
            return pair[1], pair[0]

    times = profile.profile_times(
        nn.Sequential(Swap(), Swap()), (torch.rand(2), torch.rand(2)), 0.0, torch.device("cpu")
    )
    assert len(times) == 2


def test_skip_connections_are_measured_too():
    """torchgpipe's goes back through the first layer's graph a second time, and fails."""

    @skip.skippable(stash=["a", "none"])
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            yield skip.stash("a", self.linear(x))
            yield skip.stash("none", None)
            return self.linear(x)

    @skip.skippable(pop=["a", "none"])
    class Last(nn.Module):
        def forward(self, x):
            yield skip.pop("none")
            return x * (yield skip.pop("a"))

    layers = nn.Sequential(First(), nn.Tanh(), Last())
    assert sum(balance_by_time(2, layers, torch.rand(2, 4), timeout=0.0, device="cpu")) == 3
    assert sum(balance_by_size(2, layers, torch.rand(2, 4), device="cpu")) == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_by_size(device):
    def size(layers, sample, **options):
        return balance_by_size(2, nn.Sequential(*layers), sample, device=device, **options)

    sample = torch.rand(10, 100, 100)
    assert size([Grow(i) for i in (1, 2, 3, 4, 5, 6)], sample) == [4, 2]
    assert size([Grow(i) for i in (6, 5, 4, 3, 2, 1)], sample) == [2, 4]
    growing = [nn.Linear(i + 1, i + 2) for i in range(6)]
    assert size(growing, torch.rand(7, 1), param_scale=100) == [4, 2]
    shrinking = [nn.Linear(i + 2, i + 1) for i in reversed(range(6))]
    assert size(shrinking, torch.rand(1, 7), param_scale=100) == [2, 4]
    both = [Grow(7 - i, size=i) for i in range(1, 7)]
    sample = torch.rand(1, requires_grad=True)
    assert size(both, sample, param_scale=0) == [2, 4]
    assert size(both, sample, param_scale=100) == ([5, 1] if device == "cpu" else [4, 2])


def test_size_counts_micro_batches():
    """With few large micro-batches activations decide, with many small ones parameters do."""
    layers = nn.Sequential(Grow(1, size=64), Grow(0, size=64), Grow(4), Grow(4))
    sample = torch.rand(4096, 1)
    assert balance_by_size(2, layers, sample, chunks=1, device="cpu") == [2, 2]
    assert balance_by_size(2, layers, sample, chunks=1024, device="cpu") == [1, 3]


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Linear(4, 4)])
def test_layers_may_work_in_place(first):
    """A leaf that requires grad was given to a layer that works in place."""
    model = nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    sample = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    assert sum(balance_by_time(2, model, sample, timeout=0, device="cpu")) == 4
    assert sum(balance_by_time(2, model, sample.requires_grad_(), timeout=0, device="cpu")) == 4
    assert sum(balance_by_size(2, model, sample, device="cpu")) == 4
    assert sample.tolist() == [[-1, 0, 1, 2]]
