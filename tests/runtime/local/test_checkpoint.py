"""What autograd and callers may do with stages that recompute their activations."""

import copy

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


@pytest.mark.parametrize("way", ["in place", "data"])
def test_weights_changed_before_the_backward_are_refused(module, way):
    """The gradients were those of the new weights."""
    loss = run(module, torch.rand(4, 3)).sum()
    with torch.no_grad():
        if way == "data":
            module[2].weight.data = 2 * module[2].weight
        else:
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


class Centred(nn.Module):
    """A layer that subtracts a moving average of what it has seen, which two names hold."""

    def __init__(self, writes):
        super().__init__()
        self.layer, self.writes = nn.Linear(3, 3), writes
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("same", self.seen)

    def forward(self, x):
        h = self.layer(x) - self.same.clone()
        mean = torch.lerp(self.seen, h.detach().mean(0), 0.5)
        if self.writes == "counted":
            self.seen.copy_(mean)
        elif self.writes == "uncounted":
            self.seen.data.copy_(mean)
        else:
            self.seen = self.same = mean
        return h * h


@pytest.mark.parametrize("writes", ["counted", "uncounted", "replaced"])
def test_a_recomputation_finds_the_buffers_of_its_forward(writes):
    """It found those of the batch's last micro-batch, and gradients were of other activations."""
    torch.manual_seed(0)
    module = Centred(writes)
    whole, x = copy.deepcopy(module), torch.rand(4, 3)
    for _ in range(2):
        run(module, x).sum().backward()
        torch.cat([whole(half) for half in x.chunk(2)]).sum().backward()
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(module.seen, whole.seen)


class Late(nn.Module):
    """Changes a buffer from its second forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x.max() > 1:
            self.count += 1
        return x * (1 + self.count)


def test_a_buffer_written_for_the_first_time_in_a_later_forward_is_refused():
    x = torch.tensor([[0.5], [2.0]], requires_grad=True)
    with pytest.raises(InvalidInput, match=r"changes the buffer 'count' of a Late.*checkpoint='ne"):
        run(Late(), x)
