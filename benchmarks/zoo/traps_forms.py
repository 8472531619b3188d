"""Traps of calling: how inputs come in and outputs go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import MLP, WIDTH, describe


@dataclass
class Result:
    scores: Tensor
    hidden: Tensor | None = None


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class SameTensorTwice(nn.Module):
    """The caller passes one tensor as two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = MLP(), MLP(), nn.Linear(WIDTH, 4)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores: Tensor = self.head(self.left(query) * self.right(key))
        return scores


class SeveralInputs(nn.Module):
    """Three inputs by keyword, in another order than declared; one of them has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.block, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(
        self, tokens: Tensor, features: Tensor, weight: Tensor | None = None, scale: float = 2.0
    ) -> Tensor:
        x = self.block(self.embedding(tokens) + scale * features)
        scores: Tensor = self.head(x if weight is None else x * weight)
        return scores


class UnusedParts(nn.Module):
    """An input and a layer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = MLP(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


class InputReturned(nn.Module):
    """Returns its input, one value twice, a number, a text and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.before(x)
        y = self.after(hidden)
        return {"y": y, "again": y, "x": x, "number": 3, "text": "done", "nothing": None}


class DataclassOutput(nn.Module):
    """Returns a data class."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Result:
        hidden = self.body(x)
        return Result(self.head(hidden), hidden)


class NestedOutput(nn.Module):
    """Returns a dictionary of tuples and lists, a named tuple among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.mean, self.spread = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"pair": Pair(self.mean(states[-1]), self.spread(states[-1])), "states": states[1:]}


class OutputsShareMemory(nn.Module):
    """Two outputs are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.head(self.body(x)).chunk(2, -1)
        return left, right


class IntegerOutput(nn.Module):
    """Predictions beside scores: whole numbers and truth values come out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.head(self.body(x))
        return scores, scores.argmax(-1), scores > 0


def _one_twice() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, WIDTH)
    return x, x


def _keywords() -> dict[str, Tensor]:
    return {
        "weight": torch.rand(4, 1),
        "features": torch.randn(4, WIDTH),
        "tokens": torch.randint(0, 16, (4,)),
    }


def _features() -> Tensor:
    return torch.randn(4, WIDTH)


ARCHITECTURES = (
    describe("trap", SameTensorTwice, _one_twice),
    describe("trap", SeveralInputs, _keywords),
    describe("trap", UnusedParts, lambda: (torch.randn(4, WIDTH), torch.randn(4, 3))),
    describe("trap", InputReturned, _features),
    describe("trap", DataclassOutput, _features),
    describe("trap", NestedOutput, _features),
    describe("trap", OutputsShareMemory, _features),
    describe("trap", IntegerOutput, _features),
)
