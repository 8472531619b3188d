"""What a tracer would lose is left to the smallest module around it, and said to be.

``trace`` compares two steps with the model itself; see the gate. What can be compared once more
by other means is compared here.
"""

import dataclasses
import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.capture.capture import trace
from stagewright.core.errors import CaptureError
from tests.capture.awkward import (
    OPAQUE,
    TRACED,
    Branch,
    Counting,
    Mixture,
    PythonChance,
    Quantised,
    Round,
    Stack,
)


def gradients(model, run, x):
    """Loss gradients by name, from equal random states."""
    torch.manual_seed(3)
    random.seed(3)
    model.zero_grad()
    run(x).square().sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def in_pieces(captured):
    """The model layer by layer."""
    pieces = [captured.segment(index, index + 1) for index in range(len(captured.layers))]

    def run(x):
        values: Any = (x,)
        for piece in pieces:
            values = piece(*values)
        return captured.unflatten_output(values)

    return run


NAMES = ["stem", "layers.0", "layers.1", "layers.2", "head"]


@pytest.mark.parametrize("kind", [*OPAQUE, *TRACED], ids=lambda kind: kind.__name__)
def test_every_kind_is_equal_and_follows_the_mode(kind):
    torch.manual_seed(0)
    model, x = Stack(kind), torch.randn(6, 8)
    captured = trace(model, x)
    graph = captured.graph
    assert [layer.name for layer in graph.layers] == NAMES
    assert all(boundary.legal for boundary in graph.boundaries)
    assert graph.fixed_mode == ()
    assert [bool(layer.opaque) for layer in graph.layers] == [False, *[kind in OPAQUE] * 3, False]
    if kind.__name__ in ("Counting", "Remembering"):
        return  # each run changes what the next one does
    found, wanted = gradients(model, in_pieces(captured), x), gradients(model, model, x)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_the_smallest_module_is_opaque_and_the_rest_is_traced():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mixture = nn.LayerNorm(8), Mixture()

        def forward(self, x):
            return x + self.mixture(self.norm(x))

    captured = trace(Stack(Block), torch.randn(6, 8))
    assert set(captured.program.opaque) == {f"layers.{index}.mixture" for index in range(3)}
    targets = [operation.target for operation in captured.graph.operations]
    assert {"layers.0.norm", "layers.0.mixture", "aten.add.Tensor"} <= set(targets)
    assert captured.graph.layers[1].opaque.startswith("layers.0.mixture could not be traced")


def test_a_straight_through_function_in_the_models_own_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(Round.apply(self.a(x), 2))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    captured = trace(model, x)
    assert captured.program.opaque == {}
    found, wanted = gradients(model, in_pieces(captured), x), gradients(model, model, x)
    assert found["a.weight"].any()
    torch.testing.assert_close(found["a.weight"], wanted["a.weight"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_opaque_blocks_checkpointed_by_their_parent_are_still_recomputed(use_reentrant):
    called = Mock()  # a list of the calls would be state that the layers share

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

        def forward(self, x):
            called()
            y = self.drop(self.fc(x)).relu()
            return y + 1 if y.sum() > 1e9 else y

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    torch.manual_seed(0)
    model, x = Parent(), torch.randn(4, 8)
    captured = trace(model, x)
    assert [bool(layer.opaque) for layer in captured.graph.layers] == [False, True, True]
    assert set(captured.segment(1, 2).state_dict()) == {"layers.0.fc.weight", "layers.0.fc.bias"}
    wanted = gradients(model, model, x)
    called.reset_mock()
    found = gradients(model, in_pieces(captured), x)
    assert called.call_count == 4
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_hooks_run_once_around_the_module_they_are_on():
    model = Stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    model.head.register_forward_hook(lambda module, args, output: output + 1)
    x = torch.randn(4, 8)
    captured = trace(model, x)
    assert set(captured.program.opaque) == {"layers.1", "head"}
    torch.testing.assert_close(in_pieces(captured)(x), model(x))


def test_dataclasses_are_returned_as_they_are():
    @dataclasses.dataclass
    class Output:
        value: Tensor
        parts: dict[str, Tensor]
        number: int = 3

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.a(x)
            return Output(self.b(h), {"hidden": h})

    model, x = Model(), torch.randn(4, 8)
    output = in_pieces(trace(model, x))(x)
    assert isinstance(output, Output)
    assert output.number == 3
    torch.testing.assert_close(output.parts["hidden"], model(x).parts["hidden"])


def test_what_cannot_be_described_is_not_put_down_to_the_model():
    """A packed sequence goes into the LSTM and comes out of it."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.fc(x), torch.tensor([3, 2]), batch_first=True
            )
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    model, x = Packed(), torch.randn(2, 3, 4)
    captured = trace(model, x)
    torch.testing.assert_close(in_pieces(captured)(x), model(x))


def test_numbers_computed_from_data_are_not_frozen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            y = self.fc(x)
            return y, y.detach().sum().item()

    with pytest.raises(CaptureError, match="number"):
        trace(Model(), torch.randn(4, 8))


def test_a_random_choice_in_the_models_own_forward_is_not_frozen():
    """Symbolic tracing would draw it once and keep it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            first, second = torch.randperm(2).tolist()
            layers = [self.a, self.b]
            return layers[second](layers[first](x))

    captured = trace(Model(), torch.randn(4, 8))
    assert captured.graph.mode == "modules"
    assert "it draws random numbers" in captured.graph.layers[0].opaque


@pytest.mark.parametrize("kind", [Quantised, Branch, Counting])
def test_a_recipe_captures_the_same_way_again(kind):
    model, x = Stack(kind), torch.randn(6, 8)
    first = trace(model, x)
    again = trace(model, torch.zeros(6, 8), check=False, recipe=first.structure.recipe)
    assert again.program.opaque == first.program.opaque
    assert again.graph.layers == first.graph.layers


def test_the_report_tells_what_stayed_as_written():
    report = trace(Stack(PythonChance), torch.randn(6, 8)).report()
    assert [layer.how for layer in report.layers] == ["traced", *["opaque"] * 3, "traced"]
    assert "random numbers" in str(report)
    assert "3 of them opaque" in str(report)
    assert "different inputs" in report.checked


class Transformed(nn.Module):
    """Applies a transform of torch.func to one of its layers, around other layers."""

    def __init__(self, transform):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.transform = transform

    def forward(self, x):
        h = self.a(x)
        return self.c(h + self.transform(self.b)(h))


@pytest.mark.parametrize(
    "transform",
    [
        lambda layer: torch.func.grad(lambda h: layer(h).square().sum()),
        lambda layer: torch.func.vmap(layer),
        lambda layer: lambda h: torch.func.functional_call(layer, {"bias": h[0].detach()}, (h,)),
    ],
)
def test_transforms_of_functions_inside_forward_are_observed(transform):
    """Looking at the tensors inside failed: it was said that the model fails on its sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Transformed(transform), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    captured = trace(model, x)
    assert len(captured.graph.layers) >= 3
    found, wanted = gradients(model, in_pieces(captured), x), gradients(model, model, x)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
