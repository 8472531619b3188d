"""Which buffers of a stage with replicas may move: running statistics, and no others."""

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.batchnorm.fixed_buffers import FixedBuffers


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("seen", torch.full((4,), float("nan")))
        self.inner.register_buffer("calls", torch.tensor(0))


def in_place(inner):
    inner.seen.add_(1).fill_(2)


def replaced(inner):
    inner.seen = torch.zeros(4)


def resized(inner):
    inner.seen = torch.zeros(5)


def dropped(inner):
    inner.seen = None


def behind_autograd(inner):
    inner.calls.data.add_(1)


@pytest.mark.parametrize("move", [in_place, replaced, resized, dropped, behind_autograd])
def test_a_forward_that_moves_one_is_refused(move):
    model = Holding()
    name = "calls" if move is behind_autograd else "seen"
    with (
        pytest.raises(InvalidInput, match=f"changes the buffer 'inner.{name}'"),
        FixedBuffers(model).checked(),
    ):
        move(model.inner)


@pytest.mark.parametrize("move", [in_place, replaced])
def test_also_when_it_begins_to_later(move):
    model = Holding()
    fixed = FixedBuffers(model)
    with fixed.checked():
        pass
    with pytest.raises(InvalidInput, match=r"inner\.seen"), fixed.checked():
        move(model.inner)


def test_running_statistics_may_and_values_that_stay_do():
    model = Holding()
    fixed = FixedBuffers(model)
    for _ in range(2):
        with fixed.checked():
            model.norm(torch.randn(8, 4))
    with FixedBuffers(model).checked():
        model.inner.seen = model.inner.seen.clone()  # another tensor, the same numbers
    model.eval()
    fixed.check_evaluation()
    model.train()
    with pytest.raises(InvalidInput, match=r"'norm' is in training mode.*train\(False\)"):
        fixed.check_evaluation()
