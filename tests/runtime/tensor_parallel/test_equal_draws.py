"""Ranks that share a stage draw equal random numbers, or are told."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput
from stagewright.runtime.tensor_parallel.exchange import ShardGroup
from stagewright.runtime.tensor_parallel.split_model import split_model

CPU = torch.device("cpu")


class Beside(ShardGroup):
    """One of two ranks, whose other has generators in this state, or in another."""

    def __init__(self, *, are_equal):
        super().__init__(0, 2, CPU)
        self.other, self.asked = 0 if are_equal else 1, 0

    def maximum(self, value):
        self.asked += 1
        return torch.maximum(value, value + torch.tensor([self.other, -self.other]))


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random()])
def test_a_loss_may_draw_only_what_all_ranks_draw(draw):
    with Beside(are_equal=True).check_equal_draws():
        draw(1)
    with (
        pytest.raises(InvalidInput, match="seed torch, random and numpy equally"),
        Beside(are_equal=False).check_equal_draws(),
    ):
        draw(1)


def test_a_loss_without_draws_is_not_compared():
    group = Beside(are_equal=False)
    with group.check_equal_draws():
        torch.rand(1, generator=torch.Generator())
    assert group.asked == 0


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.widen, self.pool = nn.Conv2d(3, 8, 1), pool

    def forward(self, x):
        return F.gelu(self.pool(self.widen(x)))


@pytest.mark.parametrize(
    ("pool", "draws"),
    [
        (nn.MaxPool2d(2), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.5), True),
        (nn.RReLU(), True),
        (nn.FractionalMaxPool2d(2, output_ratio=0.5), True),
    ],
)
def test_split_layers_that_may_draw_are_known(pool, draws):
    captured = trace(Pooled(pool), torch.randn(2, 3, 8, 8), check=False)
    layers = len(captured.layers)
    split = split_model(captured, [2] * layers, [0] * layers, ShardGroup(0, 2, CPU))
    assert split.draws == draws
