"""A model that cannot be captured says which module, which operation, and what to do."""

import functools
import random

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import CaptureError, InvalidInput


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


def test_a_branch_on_data_is_refused_by_name():
    with pytest.raises(CaptureError, match="into a submodule") as caught:
        trace(Branching(), torch.randn(2, 3), mode="export")
    assert caught.value.module == "Branching"
    assert caught.value.operation.startswith("test_errors.py:")


def test_the_way_out_works():
    """Children of an nn.Sequential are called whole, so their branches do not matter."""
    model = nn.Sequential(nn.Linear(3, 3), Branching())
    x = torch.ones(2, 3)
    captured = trace(model, x)
    torch.testing.assert_close(captured.segment(0, 2)(x)[0], model(x))


class Lucky(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.count = nn.Linear(3, 3), 0

    def forward(self, x):
        self.count += 1  # not part of any state that can be restored
        return self.fc(x) * self.count * random.uniform(1, 2)


def test_python_randomness_is_noticed():
    with pytest.raises(CaptureError, match="draws Python's or numpy's random numbers"):
        trace(Lucky(), torch.randn(2, 3), mode="export")


@pytest.mark.parametrize("kind", [Lucky, Branching])
def test_a_model_that_cannot_be_taken_apart_is_one_opaque_layer(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 3)
    captured = trace(model, x)
    (layer,) = captured.graph.layers
    assert layer.opaque.startswith("could not be taken apart")
    assert captured.graph.mode == "modules"
    assert [attempt.tracer for attempt in captured.report().attempts] == ["export", "trace"]
    segment = captured.segment(0, 1)
    assert set(segment.state_dict()) == {"fc.weight", "fc.bias"}
    again = trace(model, x, check=False, recipe=captured.structure.recipe)
    assert again.graph.layers == captured.graph.layers


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("text", "a sample is"),
        ((), "contains no tensor"),
        ({"y": torch.ones(2, 3)}, "itself fails on this sample: AttributeError: .dict"),
        (torch.ones(2, 5), "itself fails on this sample"),
    ],
)
def test_a_sample_that_does_not_fit_is_an_input_error(sample, words):
    with pytest.raises(InvalidInput, match=words):
        trace(Branching(), sample)


def decorated(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return call


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @decorated
    def forward(self, x, scale=None, **options):
        return self.linear(x)


def test_a_decorated_forward_is_refused_in_words():
    """Cause: torch.fx said "code: co_varnames is too small" of any model of transformers."""
    with pytest.raises(CaptureError, match="has a decorator and takes") as raised:
        trace(Decorated(), torch.ones(2, 4), mode="trace")
    assert "co_varnames" not in str(raised.value)
