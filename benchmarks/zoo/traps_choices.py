"""Traps of control flow and chance: what one run does, the next need not do."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from .parts import MLP, WIDTH, describe, rows


class StochasticDepthPython(nn.Module):
    """Skips whole blocks by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() < 0.6:
                x = block(x)
        return x


class StochasticDepthTorch(nn.Module):
    """Skips whole blocks by a number that torch draws."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()).item() < 0.6:
                x = block(x)
        return x


class DropPath(nn.Module):
    """Drops a block's result for some samples, by a mask that torch draws."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(MLP(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            if self.training:
                y = y * (torch.rand(len(x), 1) < 0.7) / 0.7
            x = x + y
        return x


class DropoutForms(nn.Module):
    """Dropout as a module, as a function, by Bernoulli, of channels, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.alpha = nn.Dropout(0.2), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.drop(self.inputs(x)).chunk(3, -1)
        rate = 0.2 if self.training else 0.0
        x = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        x = functional.dropout(self.outputs(x), 0.2, self.training)
        x = functional.dropout1d(self.alpha(x), 0.2, self.training)
        if self.training:
            x = x * torch.bernoulli(torch.full_like(x, 0.8))
        return x


class DataBranch(nn.Module):
    """Takes one of two ways, by the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.left, self.right, self.after = MLP(), MLP(), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = self.left(x) if x.sum() > 0 else self.right(2 * x)
        y: Tensor = self.after(x)
        return y


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if x.sum() > 0 else self.right(x)
        return y


class DataBranchLayer(nn.Module):
    """The same inside a small module of its own, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.blocks[1](self.blocks[0](x)))
        y: Tensor = self.blocks[2](x)
        return y


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, rank = torch.where(choice == index)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * weight[row, rank, None])
        return y


class HandWrittenMoe(nn.Module):
    """Every expert computes only the tokens sent to it, by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()
        self.experts = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for experts in self.experts:
            x = x + experts(x)
        y: Tensor = self.after(x)
        return y


class AdaptiveSteps(nn.Module):
    """Repeats a module until its result is small: how often depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.shrink, self.after = MLP(), nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = 3 * self.before(x)
        while x.norm() > 5.0:
            x = 0.7 * torch.tanh(self.shrink(x))
        y: Tensor = self.after(x)
        return y


class NumberFromData(nn.Module):
    """Scales by a number read out of a tensor, without a branch on it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        scale = x.detach().abs().max().item()
        y: Tensor = self.after(x / scale)
        return y


class LayerDrop(nn.Module):
    """Draws an order of its blocks anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        order = torch.randperm(3).tolist() if self.training else range(3)
        for index in order:
            x = self.blocks[index](x)
        return x


class ModeSwitch(nn.Module):
    """Evaluation does something else than training, in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.early, self.head = MLP(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        scores: Tensor = self.head(x) + 0.1 * self.early(x) if self.training else self.head(x)
        return scores


FEATURES = rows(4, WIDTH)
MANY = 6
"""Seeds, so that several outcomes of a choice are seen."""

ARCHITECTURES = (
    describe("trap", StochasticDepthPython, FEATURES, MANY),
    describe("trap", StochasticDepthTorch, FEATURES, MANY),
    describe("trap", DropPath, FEATURES),
    describe("trap", DropoutForms, rows(2, 6, WIDTH)),
    describe("trap", DataBranch, FEATURES, MANY),
    describe("trap", DataBranchLayer, FEATURES, MANY),
    describe("trap", HandWrittenMoe, FEATURES, MANY),
    describe("trap", AdaptiveSteps, FEATURES, MANY),
    describe("trap", NumberFromData, FEATURES),
    describe("trap", LayerDrop, FEATURES, MANY),
    describe("trap", ModeSwitch, FEATURES),
)
