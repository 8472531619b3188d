"""Actions of one stage: when the loss is computed."""

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.runtime.batchnorm.fixed_buffers import FixedBuffers
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


class Queued(nn.Module):
    """A layer with dropout, and a queue of its outputs that the loss fills, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x):
        return (self.drop(self.layer(x)),)


def run_queued(recomputed):
    """Run two micro-batches; return losses, gradient, queue and the next random number."""
    torch.manual_seed(0)
    module = Queued()

    def loss(outputs, target):
        module.queue.data.lerp_(outputs[0].detach().mean(0), 0.5)
        noise = torch.rand_like(outputs[0])
        return (outputs[0] - module.queue.clone() - target + noise).pow(2).mean()

    received = TensorSpec(name="x", shape=(3, 2), dtype="float32")
    stage = StageRunner(module, [received], [], loss, torch.device("cpu"))
    stage.begin(trains=True)
    for microbatch in range(2):
        x, target = torch.ones(3, 2), torch.ones(3, 2)
        stage.forward(microbatch, [x], target=target, recomputed=recomputed)
        stage.backward(microbatch, [])
    return *stage.losses, module.layer.weight.grad, module.queue, torch.rand(1)


def test_a_recomputed_stage_repeats_its_random_numbers_but_not_those_of_its_loss():
    """The loss also changes buffers of the stage, which the recomputation does not undo."""
    for kept, recomputed in zip(run_queued(False), run_queued(True), strict=True):
        torch.testing.assert_close(kept, recomputed)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_loss_that_changes_a_replicated_stage_s_buffer_is_refused(recomputed):
    """Compared by value: changes through ``.data`` are not counted."""
    module = Queued().eval()

    def loss(outputs, target):
        module.queue.data.lerp_(outputs[0].detach().mean(0), 0.5)
        return (outputs[0] - target).pow(2).mean()

    received = TensorSpec(name="x", shape=(3, 2), dtype="float32")
    fixed = FixedBuffers(module)
    stage = StageRunner(module, [received], [], loss, torch.device("cpu"), fixed=fixed)
    stage.begin(trains=True)
    words = f"the {'loss' if recomputed else 'forward'} changes the buffer 'queue'"

    def step():
        stage.forward(0, [torch.ones(3, 2)], target=torch.ones(3, 2), recomputed=recomputed)
        stage.backward(0, [])

    with pytest.raises(InvalidInput, match=words):
        step()


class Table(nn.Module):
    """Reads a large constant and moves a small average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.rand(3, 2))
        self.register_buffer("mean", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = []

    def forward(self, x):
        self.seen.append((self.table.data_ptr(), self.mean.data_ptr()))
        out = x * self.weight + self.table + self.mean
        self.mean.add_(1)
        return (out,)


def test_a_recomputation_copies_only_the_buffers_that_change():
    """Rotary tables and masks were copied for every micro-batch."""
    module = Table()
    spec = TensorSpec(name="x", shape=(3, 2), dtype="float32")
    stage = StageRunner(module, [spec], [], lambda o, t: o[0].sum(), torch.device("cpu"))
    stage.begin(trains=True)
    for microbatch in range(2):
        stage.forward(microbatch, [torch.ones(3, 2)], target=1, recomputed=True)
    for microbatch in range(2):
        stage.backward(microbatch, [])
    tables, means = zip(*module.seen, strict=True)
    assert len(module.seen) == 4
    assert set(tables) == {module.table.data_ptr()}
    assert module.mean.data_ptr() not in means[2:]
    assert float(module.mean) == 2
