"""A wrong graph is loud: the gate takes two steps, with inputs of their own."""

import dataclasses

import pytest
import torch
from torch import nn

from stagewright.capture.equivalence.check import check_piecewise_run, run_eager_steps, vary_inputs
from stagewright.capture.sample import read_sample
from stagewright.core.errors import CaptureError


class Scaled(nn.Module):
    """Multiplies by the largest value; stands for anything that depends on data."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.fc(x) * self.factor(x)

    def factor(self, x):
        return x.detach().amax()


class Piece(nn.Module):
    """The model, traced wrongly in one way."""

    def __init__(self, model, mistake, sample):
        super().__init__()
        self.model, self.mistake, self.frozen = model, mistake, model.factor(sample)

    def forward(self, x):
        if self.mistake == "takes over the sample":
            y = self.model.fc(x) * self.frozen
        elif self.mistake == "loses a gradient":
            y = nn.functional.linear(x, self.model.fc.weight, self.model.fc.bias.detach())
            y = y * self.model.factor(x)
        else:
            y = self.model.fc(x) * self.model.factor(x)
        if self.mistake != "forgets a buffer":
            self.model.steps.add_(1)
        return (y,)


def judge(mistake, steps=2):
    torch.manual_seed(0)
    model, sample = Scaled(), torch.randn(3, 4)
    structure, flat = read_sample(model, sample)
    expected = run_eager_steps(model, structure, flat)
    fewer = dataclasses.replace(
        expected, inputs=expected.inputs[:steps], behaviours=expected.behaviours[:steps]
    )
    check_piecewise_run(model, [Piece(model, mistake, sample)], [], lambda flat: flat[0], fewer)


def test_the_model_itself_passes():
    judge("")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("takes over the sample", "output 0 differs"),
        ("loses a gradient", r"the gradient of 'fc\.bias' differs"),
        ("forgets a buffer", "the buffer 'steps' differs"),
    ],
)
def test_a_mistake_is_named(mistake, words):
    with pytest.raises(CaptureError, match=words):
        judge(mistake)


def test_what_the_sample_shows_alone_takes_the_second_step():
    judge("takes over the sample", steps=1)


def test_made_up_inputs_stay_valid():
    sample = (
        torch.arange(6).reshape(2, 3),
        torch.tensor([True, False, False]),
        torch.tensor([0.0, float("-inf"), 0.0]),
        torch.linspace(2.0, 3.0, 10),
        torch.ones(5),
    )
    first, floats, same = list(vary_inputs(sample))
    assert sorted(first[0].flatten().tolist()) == list(range(6))
    assert int(first[1].sum()) == 1
    assert first[2].isinf().sum() == 1
    assert first[3].min() >= 2
    assert first[3].max() <= 3
    assert not torch.equal(first[3], sample[3])
    assert not torch.equal(first[4], sample[4])
    assert floats[0] is sample[0]
    assert all(ours is theirs for ours, theirs in zip(same, sample, strict=True))
