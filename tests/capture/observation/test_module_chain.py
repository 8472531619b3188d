"""Models that are chains of their layers' modules, and what breaks a chain, by name.

What is said to be a chain is run as one: a list of modules, each with what the one before returned.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stagewright.capture.capture import capture

WIDTH = 8


class Net(nn.Module):
    """A chain: embed, layers, head; subclasses change how it runs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(3))

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.head(self.run(self.embed(x)))

    def run(self, x):
        for layer in self.layers:
            x = self.step(layer, x)
        return x

    def step(self, layer, x):
        return layer(x)


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return self.inner(x) * scale


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x), x


class Functional(Net):
    def step(self, layer, x):
        return functional.relu(layer(x))


class InPlace(Net):
    def block(self):
        return nn.Linear(WIDTH, WIDTH)

    def step(self, layer, x):
        return layer(x).relu_()


class Residual(Net):
    def step(self, layer, x):
        return x + layer(x)


class LongSkip(Net):
    def run(self, x):
        return super().run(x) + x


class OtherDefault(Net):
    def block(self):
        return Scaling()

    def step(self, layer, x):
        return layer(x, scale=2.0)


class Pairs(Net):
    def block(self):
        return Pair()

    def step(self, layer, x):
        return layer(x)[0]


class InputScaled(Net):
    def forward(self, x):
        return super().forward(x / 2)


class OutputScaled(Net):
    def forward(self, x):
        return super().forward(x) * 2


class OutputNamed(Net):
    def forward(self, x):
        return {"out": super().forward(x)}


class Frozen(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.embed(x)
        return self.head(self.run(x))


class WeightRead(Net):
    def forward(self, x):
        return functional.linear(self.run(self.embed(x)), self.embed.weight)


class TwoInputs(Net):
    def forward(self, x, y):
        return super().forward(x) * y


class Adding(nn.Module):
    """A block whose own forward holds what is around its modules."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.relu(self.inner(x))


class Whole(Net):
    """Its activation is a module that runs after each block."""

    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()

    def block(self):
        return Adding()

    def step(self, layer, x):
        return self.activation(layer(x))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Functional, "operation 'relu'"),
        (InPlace, "operation 'relu_'"),
        (Residual, "operation 'add'"),
        (LongSkip, "operation 'add'"),
        (
            OtherDefault,
            "module 'layers.0' takes more, or something else, than the value of 'embed'",
        ),
        (Pairs, "module 'layers.1' takes more, or something else, than the value of 'layers.0'"),
        (InputScaled, "operation 'div'"),
        (OutputScaled, "operation 'mul'"),
        (OutputNamed, "the model returns more, or something else, than the value of 'head'"),
        (Frozen, "operation 'linear'"),
        (WeightRead, "operation 'linear"),
    ],
)
def test_what_a_list_of_modules_would_leave_out_is_named(build, expected):
    graph = capture(build(), torch.randn(4, WIDTH))
    assert graph.chain_break is not None
    assert graph.chain_break.startswith(expected)


def test_a_model_of_two_inputs_is_no_chain():
    graph = capture(TwoInputs(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)))
    assert graph.chain_break == "the model takes 2 inputs"


def build_sequential():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Adding())


@pytest.mark.parametrize("build", [Net, Whole, build_sequential])
def test_a_chain_runs_as_a_list_of_its_modules(build):
    torch.manual_seed(0)
    model, x = build(), torch.randn(4, WIDTH)
    graph = capture(model, x)
    assert graph.chain_break == ""
    value = x
    for layer in graph.layers:
        value = model.get_submodule(layer.name.partition("@")[0])(value)
    torch.testing.assert_close(value, model(x), rtol=0, atol=0)


def test_documents_without_it_keep_their_ids_and_stay_unknown():
    graph = capture(Net(), torch.randn(4, WIDTH))
    older = graph.model_copy(update={"chain_break": None})
    assert "chain_break" not in older.to_json()
    read = type(graph).from_json(older.to_json())
    assert read.chain_break is None
    assert read.content_id() == older.content_id() != graph.content_id()
