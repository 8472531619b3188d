"""A wrong graph is loud: the gate takes two steps, with inputs of their own."""

import dataclasses

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.equivalence.check import (
    PiecewiseModel,
    check_piecewise_run,
    run_eager_steps,
    vary_inputs,
)
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
        if self.mistake == "fails":
            raise IndexError("index 5 is out of bounds\nframe #0")
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
    cut = PiecewiseModel(model, [Piece(model, mistake, sample)], [], lambda flat: flat[0])
    check_piecewise_run(cut, fewer)


def test_the_model_itself_passes():
    judge("")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("takes over the sample", "output 0 differs"),
        ("loses a gradient", r"the gradient of 'fc\.bias' differs"),
        ("forgets a buffer", "the buffer 'steps' differs"),
        (
            "fails",
            "fails where the model does not: IndexError: index 5 is out of bounds$",
        ),
    ],
)
def test_a_mistake_is_named(mistake, words):
    with pytest.raises(CaptureError, match=words):
        judge(mistake)


def looks_at_data(x):
    return float(x.detach().abs().amax()) > 1e6


class MovesDataOfBuffer(nn.Module):
    """Called as written; autograd does not see that the buffer of an earlier forward is gone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        x = x / 2 if looks_at_data(x) else x
        self.scale.data.mul_(0.9)
        return x * self.scale


def test_a_buffer_written_through_data_is_found_with_two_micro_batches_in_flight():
    model = nn.Sequential(nn.Linear(4, 4), MovesDataOfBuffer(), nn.Linear(4, 4))
    words = r"two micro-batches in flight.*the gradient of '0\.bias' differs by 0\.1 .*clone\(\)"
    with pytest.raises(CaptureError, match=words):
        trace(model, torch.randn(3, 4))


def test_a_model_that_is_no_pipeline_even_as_a_whole_is_told_why():
    class Whole(MovesDataOfBuffer):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return super().forward(self.linear(x))

    with pytest.raises(CaptureError, match=r"Whole could not be captured:\n  with two micro-bat"):
        trace(Whole(), torch.randn(3, 4))


def test_a_write_in_place_that_autograd_will_notice_is_left_to_it():
    class Decaying(MovesDataOfBuffer):
        def forward(self, x):
            self.scale.mul_(0.9)
            return x * self.scale

    trace(nn.Sequential(nn.Linear(4, 4), Decaying()), torch.randn(3, 4))


SHARED = {"scale": torch.ones(()), "factor": 1.0}


class Leaves(nn.Module):
    """Leaves a value in a global variable, of this micro-batch or always the same."""

    def __init__(self, key):
        super().__init__()
        self.linear, self.key = nn.Linear(4, 4), key

    def forward(self, x):
        x = self.linear(x / 2 if looks_at_data(x) else x)
        SHARED[self.key] = x.detach().mean() if self.key == "scale" else 2.0
        return x


class Takes(Leaves):
    def forward(self, x):
        x = x / 2 if looks_at_data(x) else x
        return self.linear(x) * SHARED[self.key]


@pytest.mark.parametrize("key", ["scale", "factor"])
def test_layers_called_as_written_that_share_a_global_are_not_separated(key, monkeypatch):
    monkeypatch.setitem(SHARED, key, SHARED[key])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.between, self.last = Leaves(key), nn.Linear(4, 4), Takes(key)

        def forward(self, x):
            return self.last(self.between(self.first(x)))

    graph = trace(Model(), torch.randn(3, 4)).graph
    assert [layer.name for layer in graph.layers] == ["Model"]
    assert "variable outside the model" in graph.layers[0].opaque
    assert graph.layers[0].stateful == f"{__name__}.SHARED"


def test_an_alias_of_another_layers_weight_is_not_separated_from_it():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.alias = self.first.weight.detach()

        def forward(self, x):
            return self.last(self.first(x)) @ self.alias

    captured = trace(Aliased(), torch.randn(3, 4))
    assert len(captured.layers) == 1
    words = "a layer reads 'first.weight', which is not among its own weights"
    assert {attempt.refusal for attempt in captured.report().attempts} == {words}


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


def test_a_small_effect_of_training_alone_is_not_taken_for_rounding():
    """DINOv3 jitters its positions in training, which moved evaluation by 4e-4: it was accepted."""

    class Jitters(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            if self.training:
                x = x * (1 + 1e-4 * torch.rand(()))
            return self.last(x)

    torch.manual_seed(0)
    model, x = Jitters(), torch.randn(3, 4)
    captured = trace(model, x)
    pieces = [captured.segment(0, 1).eval(), captured.segment(1, 2).eval()]
    assert torch.equal(pieces[1](*pieces[0](x))[0], model.eval()(x))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        assert (x < 100).all()
        return self.fc(x)


def test_what_could_not_be_observed_is_said():
    """Cause: a model that fails on its sample was taken for one without hidden state."""
    notes = trace(Small(), torch.full((2, 4), 200.0), check=False).graph.notes
    assert any("not looked for, since Small itself fails on this sample" in note for note in notes)
    assert not any("looked for" in note for note in trace(Small(), torch.zeros(2, 4)).graph.notes)
    with torch.device("meta"):
        notes = trace(Small(), torch.zeros(2, 4), check=False).graph.notes
    (note,) = (note for note in notes if "looked for" in note)
    assert "Small reads values, and it ran without any" in note
    assert "item()" not in note, "nobody who asked for an estimate knows meta tensors"
