"""Capturing changes nothing about the model, nor about the random generators."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.observation.preserve import copy_module, get_random_state, preserve_model
from stagewright.core.errors import CaptureError
from tests.capture.awkward import (
    CheckpointedReentrant,
    DropPath,
    LazyCache,
    Mixture,
    PythonChance,
    Quantised,
    Remembering,
    Stack,
)
from tests.state_checks import snapshot
from tests.torch_models import make_case


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
@pytest.mark.parametrize("training", [True, False])
def test_capture_leaves_the_model_as_it_was(name, training):
    case = make_case(name)
    case.model.train(training)
    next(case.model.parameters()).grad = torch.ones_like(next(case.model.parameters()))
    before = snapshot(case.model)
    trace(case.model, case.sample)
    assert snapshot(case.model) == before


def everything(model):
    """Attributes, hooks and classes of every module, and the random generators."""
    attributes = [
        {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers")
        }
        for module in model.modules()
    ]
    classes = [dict(vars(type(module))) for module in model.modules()]
    return attributes, classes, get_random_state(), snapshot(model)


KINDS = [PythonChance, Mixture, CheckpointedReentrant, Remembering, DropPath, LazyCache, Quantised]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_left_behind_by_what_is_called_as_written(kind):
    model = Stack(kind)
    model.layers[0].register_forward_hook(lambda module, args, output: None)
    np.random.seed(1)
    x = torch.randn(6, 8)
    before = everything(model)
    call = nn.Module.__call__
    trace(model, x)
    assert everything(model) == before
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("at", [1, 5, 9, 14, 18])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_the_model_as_it_was(at, error):
    """In the first step, in the second, while tracing, while comparing."""
    calls = []

    class Interrupting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm, self.seen = nn.Linear(8, 8), nn.BatchNorm1d(8), []

        def forward(self, x):
            random.random()
            self.seen.append(x)
            calls.append(1)
            if len(calls) == at:
                raise error("stopped")
            return self.norm(self.fc(x))

    model, x = Stack(Interrupting), torch.randn(6, 8)
    before = everything(model)
    call = nn.Module.__call__
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else suppress(Exception):
        trace(model, x)
    assert len(calls) >= at
    assert everything(model) == before
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("through_data", [True, False])
def test_parameters_are_not_changed_by_a_forward_that_would(through_data):
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if through_data:
                self.fc.weight.data.clamp_(-0.01, 0.01)
            else:
                with torch.no_grad():
                    self.fc.weight.mul_(0.5)
            return self.fc(x)

    model, x = Clamping(), torch.randn(3, 4)
    before = snapshot(model)
    with pytest.raises(CaptureError, match=r"changes its own parameter 'fc\.weight'"):
        trace(model, x)
    assert snapshot(model) == before


def test_replaced_memory_and_modules_are_put_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    parameter, memory, first = model[0].weight, model[0].weight.data_ptr(), model[0]
    with preserve_model(model):
        model[0].weight.data = torch.zeros(4, 4)
        model[0] = nn.Linear(4, 4)
    assert model[0] is first
    assert first.weight is parameter
    assert parameter.data_ptr() == memory


def test_frozen_submodules_stay_frozen_while_capturing():
    case = make_case("resnet")
    case.model.bn1.eval()
    captured = trace(case.model, case.sample)
    assert captured.program.training
    assert not case.model.bn1.training


def test_a_copy_keeps_hooks_of_weights():
    """deepcopy leaves them out, so that a masked gradient was called wrong."""
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient.tril())
    model.bias.register_hook(lambda gradient: 2 * gradient)
    model.bias.requires_grad_(False)
    made = copy_module(model)
    for each in (model, made):
        each(torch.ones(2, 4)).sum().backward()
    assert torch.equal(made.weight.grad, torch.full((4, 4), 2.0).tril())
    assert torch.equal(made.weight.grad, model.weight.grad)
    assert made.bias.grad is None
