"""The same script with torchgpipe and with the drop-in: the same losses, step by step."""

import copy

import pytest
import torch
import torchgpipe
import torchgpipe.skip
from torch import nn

import stagewright.torchgpipe
import stagewright.torchgpipe.skip

MODES = ["always", "except_last", "never"]
STEPS = 4
ROUNDING = 1e-11


def plain(library):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def batch_norm(library):
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.Linear(8, 1),
    )  # fmt: skip


def dropout(library):
    return nn.Sequential(
        nn.Linear(6, 64), nn.Dropout(0.3), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 1)
    )


def skips(library):
    skip = library.skip

    @skip.skippable(stash=["far", "near"])
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            yield skip.stash("far", x)
            y = self.linear(x)
            yield skip.stash("near", y.tanh())
            return y

    @skip.skippable(pop=["near"])
    class Near(nn.Module):
        def forward(self, x):
            return x + (yield skip.pop("near"))

    @skip.skippable(pop=["far"])
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def forward(self, x):
            return self.linear(x * (yield skip.pop("far")))

    return nn.Sequential(First(), Near(), nn.Linear(6, 6), Last())


def losses(library, build, balance, **options):
    """Of some steps of training, and of one evaluation after them."""
    torch.manual_seed(0)
    module = build(library).double()
    balance = balance[: len(balance)] if sum(balance) == len(module) else [1, len(module) - 1]
    devices = ["cpu"] * len(balance)
    model = library.GPipe(copy.deepcopy(module), balance, devices=devices, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        x = torch.rand(12 if step else 11, 6, dtype=torch.double, generator=data)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    model.eval()
    evaluated = model(torch.rand(12, 6, dtype=torch.double, generator=data)).pow(2).mean().item()
    return found, evaluated


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("build", [plain, batch_norm, dropout, skips])
def test_losses_of_every_step_are_torchgpipes(build, checkpoint, chunks):
    options = dict(balance=[2, 2, 1], chunks=chunks, checkpoint=checkpoint)
    ours, our_evaluation = losses(stagewright.torchgpipe, build, **options)
    theirs, their_evaluation = losses(torchgpipe, build, **options)
    assert ours == pytest.approx(theirs, rel=ROUNDING)
    if build is not batch_norm or checkpoint == "never":  # else its statistics moved twice
        assert our_evaluation == pytest.approx(their_evaluation, rel=ROUNDING)


@pytest.mark.parametrize("checkpoint", MODES)
def test_deferred_batch_norm_is_torchgpipes(checkpoint):
    options = dict(balance=[2, 2, 2], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    ours = losses(stagewright.torchgpipe, batch_norm, **options)
    theirs = losses(torchgpipe, batch_norm, **options)
    assert ours[0] == pytest.approx(theirs[0], rel=ROUNDING)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)  # it sums in single precision


def test_state_dicts_are_exchanged():
    torch.manual_seed(0)
    for build in (plain, batch_norm, skips):
        models = [
            library.GPipe(
                build(library), [2, len(build(library)) - 2], devices=["cpu"] * 2, chunks=2,
                deferred_batch_norm=True,
            )
            for library in (torchgpipe, stagewright.torchgpipe)
        ]  # fmt: skip
        models[1].load_state_dict(models[0].state_dict())
        assert list(models[1].state_dict()) == list(models[0].state_dict())
        x = torch.rand(4, 6)
        torch.testing.assert_close(models[0](x), models[1](x))
