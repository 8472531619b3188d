"""A backward in two parts accumulates what one backward does, each weight in one of them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from stagewright.core.errors import InvalidInput
from stagewright.runtime.engine.split_backward import SplitBackward


class Tangled(nn.Module):
    """Weights used once, twice, over time, beside the spine, and by an output without an input."""

    def __init__(self):
        super().__init__()
        self.once, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(1, 1, 3, padding=1)
        self.scale, self.lstm = nn.Parameter(torch.randn(8)), nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.beside = nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(torch.relu(self.once(x)))
        y = y + self.twice(self.twice(y)).relu_()
        y = self.lstm(y * self.scale.exp())[0]
        y = self.attention(y, y, y)[0]
        y = self.conv(y.reshape(-1, 1, 8)).reshape(y.shape)
        return y, self.beside(torch.ones(4, 8, dtype=x.dtype)), self.beside.weight.sum() + y.sum()


class OneOutput(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return (self.model(x),)


def gradients(model, x, *, split):
    model.zero_grad()
    x = x.clone().requires_grad_()
    outputs = model(x)
    arriving = [torch.full_like(value, 0.5 + index) for index, value in enumerate(outputs)]
    if split:
        both = SplitBackward([get_gradient_edge(value) for value in outputs], arriving, [x])
        del outputs
        both.run_input_part()
        early = {name for name, weight in model.named_parameters() if weight.grad is not None}
        inputs = x.grad.clone()
        both.run_weight_part()
        assert torch.equal(x.grad, inputs)
    else:
        torch.autograd.backward(outputs, arriving)
        early = set()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {**found, "x": x.grad}, early


def test_both_parts_are_the_whole():
    torch.manual_seed(0)
    model, x = Tangled().double(), torch.randn(3, 4, 8, dtype=torch.float64)
    whole, _ = gradients(model, x, split=False)
    parts, early = gradients(model, x, split=True)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-12, atol=0, msg=name)
    assert {"twice.weight", "lstm.weight_hh_l0", "beside.weight"} <= early
    assert not early & {"once.weight", "norm.weight", "conv.weight", "scale", "beside.bias"}


def test_group_norm_computes_its_weights_gradients_with_the_inputs():
    """Alone they end the process on the CPU where the input is channels-last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)).to(
        dtype=torch.float64, memory_format=torch.channels_last
    )
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    whole, _ = gradients(OneOutput(model), x, split=False)
    parts, early = gradients(OneOutput(model), x, split=True)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-12, atol=0, msg=name)
    assert early == {"model.1.weight", "model.1.bias"}


def test_without_inputs_all_is_in_the_second_part():
    layer = nn.Linear(4, 4)
    output = layer(torch.ones(2, 4))
    both = SplitBackward([get_gradient_edge(output)], [torch.ones(2, 4)], [])
    both.run_input_part()
    assert layer.weight.grad is None
    both.run_weight_part()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_gradients_add_up_and_hooks_run():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    layer.weight.grad = torch.ones(4, 4)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.shape))
    both = SplitBackward([get_gradient_edge(layer(x))], [torch.ones(2, 4)], [x])
    both.run_input_part()
    assert seen == []
    both.run_weight_part()
    assert len(seen) == 1
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0))


def test_the_first_part_computes_no_weight_gradients():
    """A branch runs once, in the second part: its products are not made twice."""
    ran = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            ran.append("weight")
            return gradient

    weight = nn.Parameter(torch.randn(4))
    x = torch.randn(4, requires_grad=True)
    both = SplitBackward([get_gradient_edge(x * Noted.apply(weight))], [torch.ones(4)], [x])
    both.run_input_part()
    assert ran == []
    both.run_weight_part()
    assert ran == ["weight"]


def test_nothing_is_kept_after_both():
    """The graph and what it saved are let go."""
    import gc
    import weakref

    x = torch.randn(4, requires_grad=True)
    inner = (x * 2).exp()
    watched = weakref.ref(inner)
    both = SplitBackward([get_gradient_edge(inner * inner)], [torch.ones(4)], [x])
    del inner
    both.run_input_part()
    both.run_weight_part()
    del both
    gc.collect()
    assert watched() is None


def test_a_compiled_stage_is_refused():
    """Its second run read memory that the first had used again: gradients 30 times too large."""
    stage = torch.compile(OneOutput(nn.Linear(2, 2)), backend="aot_eager")
    x = torch.ones(1, 2, requires_grad=True)
    (y,) = stage(x)
    split = SplitBackward([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    with pytest.raises(InvalidInput, match=r"cannot be split .* such as 1f1b"):
        split.run_input_part()
    assert x.grad is None
