"""Actions of one stage: when the loss is computed."""

import pytest
import torch
from torch import nn

from stagewright.core.graph.tensors import TensorSpec
from stagewright.runtime.engine.stage import StageRunner


class Stage(nn.Module):
    """A layer that takes and returns flat values, as stages do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return (self.layer(x),)


class CountedLoss:
    """A loss with a state, as those that centre on a moving average have."""

    def __init__(self):
        self.calls, self.has_gradient = 0, []

    def __call__(self, outputs, target):
        self.calls += 1
        self.has_gradient.append(outputs[0].requires_grad)
        return self.calls * (outputs[0] - target).pow(2).mean()


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_loss_is_computed_once_a_micro_batch(recomputed):
    """It ran twice where its stage recomputes, first without a gradient, which was reported."""
    torch.manual_seed(0)
    module, loss = Stage(), CountedLoss()
    received = TensorSpec(name="x", shape=(3, 2), dtype="float32")
    stage = StageRunner(module, [received], [], loss, torch.device("cpu"))
    stage.begin(trains=True)
    batch = [(torch.rand(3, 2), torch.rand(3, 2)) for _ in range(2)]
    for microbatch, (x, target) in enumerate(batch):
        stage.forward(microbatch, [x], target=target, recomputed=recomputed)
        stage.backward(microbatch, [])
    assert loss.calls == 2
    assert loss.has_gradient == [True, True]
    found, gradient = [float(each) for each in stage.losses], module.layer.weight.grad.clone()
    module.zero_grad()
    wanted = [
        (count + 1) * (module.layer(x) - target).pow(2).mean()
        for count, (x, target) in enumerate(batch)
    ]
    sum(wanted).backward()
    assert found == pytest.approx([float(each.detach()) for each in wanted])
    torch.testing.assert_close(gradient, module.layer.weight.grad)
