"""Models whose samples know the size of their batch say so; those that do not, do not."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import capture


class Reduced(nn.Module):
    """Two layers whose result is reduced, in one way or another."""

    def __init__(self, reduce):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 4)
        self.reduce = reduce

    def forward(self, x):
        return self.reduce(self.last(self.layers(x)))


def notes(model):
    torch.manual_seed(0)
    return [note for note in capture(model, torch.rand(4, 4)).notes if "doubled" in note]


@pytest.mark.parametrize(
    "reduce",
    [
        lambda h: h / h.shape[0],
        lambda h: h.sum(0) / 4,
        lambda h: h.pow(2).sum(),
        lambda h: (h.tanh(), h - h.sum(0, keepdim=True)),
    ],
)
def test_a_size_that_is_the_micro_batch_s_is_noted(reduce):
    (note,) = notes(Reduced(reduce))
    assert "divides by their number" in note


@pytest.mark.parametrize(
    "reduce",
    [
        lambda h: h,
        lambda h: h.mean(),
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: h + torch.rand_like(h),  # not judged: it differs anyway
        lambda h: h.reshape(4, -1) * torch.arange(4.0)[:, None],  # takes four samples only
        lambda h: h @ h.T,  # not joined, but refused by the runtime
    ],
)
def test_other_models_get_no_note(reduce):
    assert notes(Reduced(reduce)) == []


def test_normalisation_over_the_batch_gets_no_note():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert notes(model) == []
