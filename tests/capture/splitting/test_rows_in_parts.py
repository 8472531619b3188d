"""Rows of several sequences behind each other, and heads beside samples: split part by part."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.splitting.layout import Shard
from tests.capture.splitting.blocks import EXACT, Block, Model, check
from tests.capture.splitting.threads import run_split, split_of


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return (torch.randn(2, 3, 8, dtype=torch.float64),)


class FlatLinear(nn.Module):
    """A linear layer as GPT-2 has it, of all sequences' rows, one behind the other."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        made = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return made.view(*x.shape[:-1], self.bias.size(0))


def flat_residual(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_rows_of_flat_products_are_divided_sequence_by_sequence(samples):
    torch.manual_seed(0)
    tokens = (torch.randn(samples, 4, 8, dtype=torch.float64),)
    blocks = [
        Block(flat_residual, norm=nn.LayerNorm(8), up=FlatLinear(8, 16), down=FlatLinear(16, 8))
        for _ in range(3)
    ]
    check(Model(*blocks), tokens, 4)
    split = split_of(trace(Model(*blocks).double(), tokens, check=False), 4)
    sums = [change.layout for change in split.changes.values() if change.sums]
    # Whole samples, where there are enough of them.
    assert sums == [Shard(0) if samples == 8 else Shard(0, (4,) * samples)] * 3
    assert not any(change.whole for change in split.changes.values() if change.sums)


def heads_as_samples(self, x):
    """As older models do it: a batched product with samples and heads in one dimension."""
    query, key, value = (
        each(x).view(*x.shape[:2], 4, 2).transpose(1, 2).reshape(-1, x.shape[1], 2)
        for each in (self.query, self.key, self.value)
    )
    weights = torch.softmax(torch.bmm(query, key.transpose(1, 2)) / 2, -1)
    found = torch.bmm(weights, value).view(-1, 4, *x.shape[1:-1], 2)
    return self.out(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("degree", [2, 4])
def test_heads_in_one_dimension_with_samples(tokens, degree):
    names = ("query", "key", "value", "out")
    model = Model(*(Block(heads_as_samples, **{n: nn.Linear(8, 8) for n in names}) for _ in "ab"))
    divided = check(model, tokens, degree)
    assert {f"blocks.1.{name}.weight" for name in names} <= divided


def test_rows_of_a_sum_are_not_divided_by_parts_of_another_size():
    """A batch of sequences was taken apart by the sizes of a later view, and a rank failed."""
    torch.manual_seed(0)
    tokens = (torch.randn(6, 4, 8, dtype=torch.float64),)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x))).reshape(-1, 8).view(3, 8, 8)

    block = Block(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8), norm=nn.LayerNorm(8))
    check(Model(block), tokens, 4)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("degree", [2, 4])
def test_parts_of_rows_are_none_of_columns(samples, degree):
    """A product that no longer ended a split began one, divided by the sizes of its rows."""
    torch.manual_seed(0)
    tokens = (torch.randn(samples, 4, 8, dtype=torch.float64),)

    def forward(self, x):
        h = self.up(x)
        return self.down(F.gelu(h)) + h.flip(-1)[..., :8]

    check(Model(Block(forward, up=FlatLinear(8, 16), down=FlatLinear(16, 8))), tokens, degree)


def test_a_value_whose_type_is_read_stays_whole():
    torch.manual_seed(0)
    tokens = (torch.randn(3, 8, 8, dtype=torch.float64),)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x))).type_as(self.other.weight)

    block = Block(forward, up=FlatLinear(8, 16), down=FlatLinear(16, 8), other=nn.Linear(5, 5))
    block.other.requires_grad_(False)
    captured = trace(Model(block).double(), tokens, check=False)
    assert split_of(captured, 4).weights
    outputs, _, divided = run_split(Model(block), tokens, 4)
    for output in outputs:
        assert (output - block(*tokens)).abs().max() <= EXACT
    assert not any("other" in name for name in divided)
