"""Capturing changes nothing about the model."""

import pytest
import torch

from stagewright.capture.capture import trace
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


def test_frozen_submodules_stay_frozen_while_capturing():
    case = make_case("resnet")
    case.model.bn1.eval()
    captured = trace(case.model, case.sample)
    assert captured.program.training
    assert not case.model.bn1.training
