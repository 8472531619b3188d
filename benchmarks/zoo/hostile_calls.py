"""Hostile ways of calling: around modules that stay as written, functions of odd signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .parts import MLP, WIDTH, describe, rows
from .traps_choices import Gate
from .traps_gradients import Quantizer


class Scaled(torch.autograd.Function):
    """Several outputs, numbers and flags as arguments, and its own idea of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, both: bool, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor, ctx.both = factor, both
        ctx.save_for_backward(y)
        place = x.argmax(-1)
        ctx.mark_non_differentiable(place)
        return factor * x + (y if both else 0), place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        return ctx.factor**2 * gradient, None, None, gradient * y if ctx.both else None


class FunctionOfMany(nn.Module):
    """An autograd function with numbers, flags and an output that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y, place = Scaled.apply(x, 1.5, True, torch.sigmoid(x))
        return self.second(y), place


class Doubles(torch.autograd.Function):
    """Works in place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class FunctionInPlace(nn.Module):
    """An autograd function that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(Doubles.apply(self.first(x)))
        return y


class CheckpointedClosure(nn.Module):
    """What is recomputed reads a tensor from outside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), MLP(), MLP()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)

        def part(inside: Tensor) -> Tensor:
            return self.drop(self.block(inside)) + skip

        y: Tensor = self.head(checkpoint(part, 2 * skip, use_reentrant=False))
        return y


class Reader(nn.Module):
    """Reads a tensor that its parent left with it; branches on data."""

    context: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if x.sum() > 0 else -self.linear(x)
        return y + self.context


class SideChannel(nn.Module):
    """Hands a tensor to a child as an attribute instead of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.reader, self.head = MLP(), Reader(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.reader.context = x * 0.5
        y: Tensor = self.head(self.reader(x))
        return y


class GateCalledTwice(nn.Module):
    """A module that branches on data is called twice, its weights tied to a third."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.tied = MLP(), Gate(), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.gate.left.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(self.tied(self.gate(self.stem(x))))
        return y


class WritesInput(nn.Module):
    def forward(self, x: Tensor, *, scale: float, also: Tensor | None = None) -> dict[str, Any]:
        if x.sum() > 0:
            x.mul_(scale)
        return {"x": x, "also": None if also is None else also + 1, "scale": scale}


class OpaqueWrites(nn.Module):
    """A child that branches on data changes its input in place and returns it in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.writes, self.head = nn.Linear(WIDTH, WIDTH), WritesInput(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        found = self.writes(h, scale=3.0, also=h.detach())
        y: Tensor = self.head(h + found["x"] + found["also"] * found["scale"])
        return y


class GateWithoutGradient(nn.Module):
    """Modules that stay as written are called under no_grad, and once more with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.quantizer, self.head = MLP(), Gate(), Quantizer(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.no_grad():
            target = self.quantizer(self.gate(x))
        y: Tensor = self.head(self.gate(x) * target)
        return y


class GateInAutocast(nn.Module):
    """A module that stays as written is called under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = MLP(), Gate(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.gate(x)
        y: Tensor = self.head(x.float())
        return y


class AlwaysDrops(nn.Module):
    """Dropout in evaluation too, and a normalisation by functions."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = MLP(), MLP()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.stem(x), 0.3, training=True)
        x = functional.batch_norm(x, self.mean, self.variance, training=self.training)
        y: Tensor = self.head(x)
        return y


class EvaluatesOtherwise(nn.Module):
    """Branches on data in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.other = MLP(), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if not self.training and x.sum() > 0:
            return self.other(x)  # type: ignore[no-any-return]
        return self.head(x)  # type: ignore[no-any-return]


class PackedSequence(nn.Module):
    """An LSTM over texts of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True, total_length=6)
        scores: Tensor = self.head(padded)
        return scores


class StateOfTwoModes(nn.Module):
    """Training counts batches in a buffer, evaluation reads the count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = MLP(), MLP()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.training:
            self.count += 1
            y: Tensor = self.head(x)
            return y
        return self.head(x) / self.count  # type: ignore[no-any-return]


class FrozenHalf(nn.Module):
    """Half of the weights stop learning inside forward, and a quarter of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.first.weight[:8], self.first.weight[8:].detach()])
        y: Tensor = self.second(functional.linear(x, weight, self.first.bias))
        return torch.cat([y[:1].detach(), y[1:]])


FEATURES = rows(4, WIDTH)
MANY = 8

ARCHITECTURES = (
    describe("hostile", FunctionOfMany, FEATURES),
    describe("hostile", FunctionInPlace, FEATURES),
    describe("hostile", CheckpointedClosure, FEATURES),
    describe("hostile", SideChannel, FEATURES, MANY),
    describe("hostile", GateCalledTwice, FEATURES, MANY),
    describe("hostile", OpaqueWrites, FEATURES, MANY),
    describe("hostile", GateWithoutGradient, FEATURES, MANY),
    describe("hostile", GateInAutocast, FEATURES, MANY),
    describe("hostile", AlwaysDrops, FEATURES),
    describe("hostile", EvaluatesOtherwise, FEATURES, MANY),
    describe("hostile", PackedSequence, lambda: (torch.randn(3, 6, 8), torch.randint(1, 7, (3,)))),
    describe("hostile", StateOfTwoModes, FEATURES),
    describe("hostile", FrozenHalf, FEATURES),
)
