"""Models that no tracer can be expected to follow: the point is that nothing is wrong silently."""

from __future__ import annotations

import itertools
import random
from typing import ClassVar

import numpy
import torch
from torch import Tensor, nn

from .parts import MLP, WIDTH, describe, rows, texts


class NumpyChance(nn.Module):
    """Skips a block by numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or numpy.random.rand() < 0.6:
                x = block(x)
        return x


class RareChoice(nn.Module):
    """Once in fifty steps it does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and random.random() < 0.02:
            x = 10 * x
        y: Tensor = self.second(x)
        return y


class RareValue(nn.Module):
    """Clips large inputs, on which a look at a few samples may not come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 3.0).any()):
            x = 0.1 * x
        y: Tensor = self.second(self.first(x))
        return y


class OwnGenerator(nn.Module):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        noise = torch.randn(x.shape, generator=self.generator)
        y: Tensor = self.second(x + 0.1 * noise)
        return y


class NumpyInside(nn.Module):
    """Leaves torch for numpy and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        order = torch.from_numpy(numpy.argsort(x.detach().numpy()[:, 0]))
        y: Tensor = self.second(x[order] + x)
        return y


class ListFromData(nn.Module):
    """Builds a tensor out of Python numbers read from another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        largest = torch.tensor([max(row) for row in x.tolist()])
        y: Tensor = self.second(x / largest[:, None])
        return y


class SharedCounter(nn.Module):
    """Counts its calls on the class, not on the instance."""

    calls: ClassVar[dict[int, itertools.count[int]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.number = len(self.calls)
        self.calls[self.number] = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) * next(self.calls[self.number]))
        return y


class GradientModeSwitch(nn.Module):
    """Does something else when gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.second(x if torch.is_grad_enabled() else 2 * x)
        return y


class ChangesParameterData(nn.Module):
    """Clips its own weight through .data, which leaves no trace in its version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        y: Tensor = self.head(self.linear(x))
        return y


class MovesBufferData(nn.Module):
    """Shrinks a buffer through .data, so that autograd does not know what a backward needed."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if float(x.detach().abs().amax()) > 0:
            self.scale.data.mul_(0.9)
        y: Tensor = self.after(x * self.scale)
        return y


class EmbeddingMaxNorm(nn.Module):
    """An embedding that shortens its own rows when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(32, WIDTH, max_norm=1.0), MLP()

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.body(self.embedding(tokens))
        return y


class WarmUp(nn.Module):
    """Initialises a weight from the first batch it sees."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ready", torch.zeros(1, dtype=torch.bool))
        self.body = MLP()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1e-3))
                self.ready.fill_(True)
        y: Tensor = self.body(x * self.scale)
        return y


class GrowingList(nn.Module):
    """Averages over all it has ever seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.history.append(x.detach().mean(0))
        y: Tensor = self.second(x - torch.stack(self.history).mean(0))
        return y


class SecondBackward(nn.Module):
    """An autograd function only where evaluation does not look: on a loss of its own."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 1.0 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return 2 * gradient

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        penalty = self.Doubled.apply(hidden).square().mean() if self.training else hidden.mean()
        return {"scores": self.head(hidden), "penalty": penalty}


FEATURES = rows(4, WIDTH)
MANY = 12

ARCHITECTURES = (
    describe("hostile", NumpyChance, FEATURES, MANY),
    describe("hostile", RareChoice, FEATURES, 60),
    describe("hostile", RareValue, FEATURES, 20),
    describe("hostile", OwnGenerator, FEATURES),
    describe("hostile", NumpyInside, FEATURES),
    describe("hostile", ListFromData, FEATURES),
    describe("hostile", SharedCounter, FEATURES),
    describe("hostile", GradientModeSwitch, FEATURES),
    describe("hostile", ChangesParameterData, FEATURES),
    describe("hostile", MovesBufferData, FEATURES),
    describe("hostile", EmbeddingMaxNorm, texts()),
    describe("hostile", WarmUp, FEATURES),
    describe("hostile", GrowingList, FEATURES),
    describe("hostile", SecondBackward, FEATURES),
)
