"""Models whose samples depend on their batch say so; those that do not, do not."""

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
    found = capture(model, torch.rand(4, 4)).notes
    return [note for note in found if "doubled" in note or "replaced" in note]


@pytest.mark.parametrize(
    "reduce",
    [
        lambda h: h / h.shape[0],
        lambda h: h.pow(2).sum(),
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
        lambda h: h + torch.rand_like(h),  # not judged: it differs anyway
        lambda h: h.reshape(4, -1) * torch.arange(4.0)[:, None],  # takes four samples only
    ],
)
def test_other_models_get_no_note(reduce):
    assert notes(Reduced(reduce)) == []


class Distinct(nn.Module):
    """Refuses a batch of which the first sample is the last; its samples know the batch's size."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if torch.equal(x[0], x[-1]):
            raise ValueError("the samples have to differ")
        return self.b(self.a(x)) / x.shape[0]


def test_one_trial_that_fails_hides_no_other():
    (note,) = notes(Distinct())
    assert "divides by their number" in note


class Recurrent(nn.Module):
    """A recurrence over the first dimension, or over the second."""

    def __init__(self, batch_first):
        super().__init__()
        self.recurrence = nn.LSTM(4, 4, batch_first=batch_first)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.recurrence(x)[0])


class Attentive(nn.Module):
    """Attention along the first dimension, or along the second."""

    def __init__(self, batch_first):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x):
        h = self.first(x)
        return self.attention(h, h, h, need_weights=False)[0]


@pytest.mark.parametrize("kind", [Recurrent, Attentive])
def test_a_first_dimension_that_is_not_the_batch_is_noted(kind):
    found = {}
    for batch_first in (False, True):
        torch.manual_seed(0)
        captured = capture(kind(batch_first), torch.rand(3, 3, 4))
        found[batch_first] = [note for note in captured.notes if "replaced" in note]
    assert len(found[False]) == 1
    assert "batch_first" in found[False][0]
    assert found[True] == []


@pytest.mark.parametrize(
    "reduce",
    [
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: (h.tanh(), h - h.sum(0, keepdim=True)),
        lambda h: h.softmax(0),
        lambda h: h @ h.T,
        lambda h: h.sum(0) / 4,  # as many features as samples
    ],
)
def test_samples_that_look_at_others_are_noted(reduce):
    (note,) = notes(Reduced(reduce))
    assert "meets only those of its micro-batch" in note


def test_normalisation_over_the_batch_is_noted_unless_it_uses_running_statistics():
    def model(has_statistics):
        norm = nn.BatchNorm1d(4, track_running_stats=has_statistics)
        return nn.Sequential(nn.Linear(4, 4), norm)

    assert notes(model(True)) == []
    (note,) = notes(model(False))
    assert "another sample of its batch is replaced" in note
