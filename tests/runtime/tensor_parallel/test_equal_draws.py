"""Random numbers of ranks that share a stage, which are equal or refused."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.distributed import _check_split
from stagewright.runtime.tensor_parallel.exchange import ShardGroup
from stagewright.runtime.tensor_parallel.split_model import split_model
from stagewright.runtime.verify_distributed import _check_masks

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
    assert split_over_two(Pooled(pool), torch.randn(2, 3, 8, 8)).draws == draws


def split_over_two(model, sample):
    captured = trace(model, sample, check=False)
    layers = len(captured.layers)
    return split_model(captured, [2] * layers, [0] * layers, ShardGroup(0, 2, CPU))


class Attention(nn.Module):
    def __init__(self, dropout_p):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.dropout_p = dropout_p

    def forward(self, x):
        heads = (
            linear(x).view(2, 6, 4, 2).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout_p)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_dropout_of_split_heads_is_known_to_differ_from_the_unsplit_model(dropout_p):
    """Right plans were said not to equal the model."""
    split = split_over_two(Attention(dropout_p), torch.randn(2, 6, 8))
    assert set(split.divided) >= {"query.weight", "key.weight", "value.weight"}
    assert split.draws_apart == bool(dropout_p)
    with pytest.raises(InvalidInput, match="attn_pdrop=0") if dropout_p else nullcontext():
        _check_masks(SimpleNamespace(split=split), trains=True)


def test_a_plan_that_splits_nothing_is_refused():
    """Each rank held and computed all, in silence."""
    blocks = nn.Sequential(Attention(0.0), Attention(0.0))
    plan = SimpleNamespace(stages=[SimpleNamespace(tensor=1), SimpleNamespace(tensor=2)])
    with pytest.raises(PlanMismatch, match=r"2 ranks.*Attention is called whole.*profile again"):
        _check_split(split_over_two(blocks, torch.randn(2, 6, 8)), plan)
    _check_split(split_over_two(blocks[0], torch.randn(2, 6, 8)), plan)
