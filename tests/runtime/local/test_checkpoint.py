"""What autograd and callers may do with stages that recompute their activations."""

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.local.run import LocalStage, run_stages
from stagewright.runtime.local.streams import StageDevice


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))


def run(module, x):
    stage = LocalStage(
        lambda microbatch, values: (module(*values),), module, StageDevice(torch.device("cpu")), 2
    )
    return torch.cat([value for (value,) in run_stages([stage], [(half,) for half in x.chunk(2)])])


def test_gradients_without_backward_are_refused(module):
    """`torch.autograd.grad` added to the gradients of all weights, and gave none of them."""
    x = torch.rand(4, 3, requires_grad=True)
    with pytest.raises(InvalidInput, match=r"torch\.autograd\.grad\(\).*checkpoint='never'"):
        torch.autograd.grad(run(module, x).sum(), x)
    with pytest.raises(InvalidInput, match=r"backward\(inputs=\.\.\.\)"):
        run(module, x).sum().backward(inputs=[x])
    with pytest.raises(InvalidInput, match="create_graph=True"):
        run(module, x).sum().backward(create_graph=True)
    assert all(weight.grad is None for weight in module.parameters())
    run(module, x).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())


def test_weights_changed_before_the_backward_are_refused(module):
    """The gradients were those of the new weights."""
    loss = run(module, torch.rand(4, 3)).sum()
    with torch.no_grad():
        module[2].weight.mul_(2)
    with pytest.raises(InvalidInput, match="weights were changed between the forward and the back"):
        loss.backward()


def test_modes_switched_before_the_backward_are_refused(module):
    """Dropout was left out of the second run."""
    loss = run(module, torch.rand(4, 3)).sum()
    module.eval()
    with pytest.raises(InvalidInput, match=r"eval\(\) was called between the forward and the back"):
        loss.backward()
    module.train()
    loss.backward()
