"""Traps of memory: plain Python that forward changes and reads again, some steps later."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from .parts import MLP, WIDTH, describe, rows


class Remembering(nn.Module):
    """Two blocks; what lies between them depends on earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.between(self.before(x)))
        return y

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class WarmUpDetached(Remembering):
    """Counts its steps, and lets no gradient into its first block after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.detach() if self.count > 3 else x


class CountsInList(Remembering):
    """Counts its steps in a list, and does something else in every fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0]

    def between(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return 2 * x if self.counts[0] % 4 == 0 else x


class CountsInDict(Remembering):
    """Counts its steps in a dict, and does something else in every fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, dict[str, int]] = {"counts": {"steps": 0}}

    def between(self, x: Tensor) -> Tensor:
        self.state["counts"]["steps"] += 1
        return 2 * x if self.state["counts"]["steps"] % 4 == 0 else x


class CountsInObject(Remembering):
    """Counts its steps in an object, and does something else in every fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimpleNamespace(steps=0)

    def between(self, x: Tensor) -> Tensor:
        self.clock.steps += 1
        return 2 * x if self.clock.steps % 4 == 0 else x


class CountsForChild(Remembering):
    """Sets a number on another module, which reads it there."""

    class Scaled(nn.Module):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if self.steps % 4 == 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.Scaled()

    def between(self, x: Tensor) -> Tensor:
        self.scaled.steps += 1
        y: Tensor = self.scaled(x)
        return y


class Inside(nn.Module):
    """One of the others as a block between two more."""

    kind: type[nn.Module] = CountsInList

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = MLP(), self.kind(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.block(self.first(x)))
        return y


class CountsInListInside(Inside):
    """A block counts its steps in a list."""


class CountsInDictInside(Inside):
    """A block counts its steps in a dict."""

    kind = CountsInDict


class CountsInObjectInside(Inside):
    """A block counts its steps in an object."""

    kind = CountsInObject


class CyclesFactors(Remembering):
    """Takes its factors from an endless iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([1.0, 1.0, 1.0, 3.0])

    def between(self, x: Tensor) -> Tensor:
        return x * next(self.factors)


class TrainsLater(Remembering):
    """Trains its first block from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        self.before.requires_grad_(self.count > 2)
        return x


class OwnDice(Remembering):
    """Draws from a generator of Python that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.dice: Any = self.make()

    def make(self) -> Any:
        return random.Random(3)

    def between(self, x: Tensor) -> Tensor:
        return 2 * x if self.dice.random() < 0.2 else x


class OwnNumpyGenerator(OwnDice):
    """Draws from a generator of numpy that it keeps."""

    def make(self) -> Any:
        return numpy.random.default_rng(3)


class OwnNumpyRandomState(OwnDice):
    """Draws from an older generator of numpy that it keeps."""

    def make(self) -> Any:
        return numpy.random.RandomState(3)


class OwnTorchGenerator(Remembering):
    """Draws from a generator of torch that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return 2 * x if torch.rand((), generator=self.generator).item() < 0.3 else x


class OwnDiceInside(Inside):
    """A block draws from a generator of Python that it keeps."""

    kind = OwnDice


FEATURES = rows(4, WIDTH)
STEPS = 6
"""Draws of inputs, one after the other on the same model: these traps close after the third."""

ARCHITECTURES = tuple(
    describe("hostile", build, FEATURES, STEPS)
    for build in (
        WarmUpDetached,
        CountsInList,
        CountsInDict,
        CountsInObject,
        CountsForChild,
        CountsInListInside,
        CountsInDictInside,
        CountsInObjectInside,
        CyclesFactors,
        TrainsLater,
        OwnDice,
        OwnNumpyGenerator,
        OwnNumpyRandomState,
        OwnTorchGenerator,
        OwnDiceInside,
    )
)
