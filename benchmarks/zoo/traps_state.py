"""Traps of state: what forward writes to, remembers, or shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .parts import MLP, WIDTH, describe, rows, texts


class InPlace(nn.Module):
    """Adds, clamps and writes slices in place, views of them included."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.add_(1.0).clamp_(min=-1.0)
        half = x[:, : WIDTH // 2]
        half.mul_(2.0)
        y = self.blocks[1](x)
        y[:, 0] = x[:, 1]
        z = self.blocks[2](y)
        z += x
        out: Tensor = self.blocks[3](z)
        return out


class InPlaceOnInput(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        y: Tensor = self.after(self.before(x) + x)
        return y


class RunningMean(nn.Module):
    """A mean kept in a buffer, changed in place and read in the same forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y: Tensor = self.after(x - self.mean)
        return y


class BufferReplaced(nn.Module):
    """Puts another tensor in a buffer's place instead of writing to it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        y: Tensor = self.after(x / self.average)
        return y


class MovingWeights(nn.Module):
    """A second copy of the weights follows the first one slowly, as in BYOL."""

    follower: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.leader = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("follower", self.leader.weight.detach().clone())
        self.head = MLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                self.follower.lerp_(self.leader.weight, 0.1)
        return self.head(self.leader(x)), x @ self.follower.T


class Queue(nn.Module):
    """Old features wait in a buffer, at a place kept in another (He et al. 2020)."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), MLP())
        self.register_buffer("queue", torch.randn(8, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        scores: Tensor = features @ self.queue.clone().T
        if self.training:
            with torch.no_grad():
                index = (self.place + torch.arange(len(x))) % 8
                self.queue[index] = features.detach()
                self.place.copy_((self.place + len(x)) % 8)
        return scores


class LazyCache(nn.Module):
    """Makes a table in its first forward and keeps it as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
        y: Tensor = self.after(self.before(x) * self.table)
        return y


class CountsSteps(nn.Module):
    """A Python number goes up in every forward and scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        y: Tensor = self.after(self.before(x) * (1.0 + 0.5 * self.step))
        return y


class RemembersLast(nn.Module):
    """Keeps the last activations as an attribute and reads them in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(x if self.last is None else x + 0.5 * self.last)
        self.last = x.detach()
        return y


class ForwardHook(nn.Module):
    """Hooks before and after a block change what it is given and what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.blocks[1].register_forward_pre_hook(lambda module, given: (2 * given[0],))
        self.blocks[1].register_forward_hook(lambda module, given, result: result + given[0])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LeafHook(nn.Module):
    """The hook sits on one of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.register_forward_hook(lambda module, given, result: 3 * result)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class CollectsByHook(nn.Module):
    """A hook puts activations into a list that the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, result: self.seen.append(result))
        self.head = nn.Linear(3 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(torch.cat(self.seen, -1))
        return scores


class CalledTwice(nn.Module):
    """One module at two depths, with statistics in it that both calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.between, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.between(self.block(x))))
        return scores


class ChangesParameter(nn.Module):
    """Clips its own weight in forward, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        y: Tensor = self.head(self.linear(x))
        return y


class PlainTensor(nn.Module):
    """Reads tensors that are neither parameters nor buffers, and makes others in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, WIDTH)
        self.tables = [torch.randn(WIDTH) for _ in range(2)]
        self.blocks = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], dtype=x.dtype)
        for block, table in zip(self.blocks, self.tables, strict=True):
            x = block(x * self.scale + table + 0.1 * position)
        return x + torch.tensor([1.0, -1.0]).repeat(WIDTH // 2)


class Reader(nn.Module):
    """Branches on its data; reads a weight that is none of its own."""

    def __init__(self, reach: Callable[[], Tensor]) -> None:
        super().__init__()
        self.norm, self.reach = nn.LayerNorm(WIDTH), reach

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weight = self.reach()
        return x @ weight.T if float(x.detach().sum()) > 0 else -x @ weight.T


class UnregisteredTie(nn.Module):
    """The head reads the weight of an embedding that it keeps in a list, and branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.between = nn.Embedding(32, WIDTH), MLP()
        hidden = [self.tokens]
        self.head = Reader(lambda: hidden[0].weight)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.between(self.tokens(ids)))
        return scores


SHARED: dict[str, Tensor] = {}


class Leaves(MLP):
    """Leaves what it saw in a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        SHARED["mean"] = x.detach().mean() * (1.0 if float(x.detach().sum()) > 0 else 2.0)
        return x


class Takes(MLP):
    """Takes what it finds there, if it is not too large."""

    def forward(self, x: Tensor) -> Tensor:
        factor = SHARED["mean"]
        return super().forward(x) * (factor if float(factor) < 1 else 1.0)


class SharesGlobal(nn.Module):
    """Two layers that branch on their data share a value by a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Leaves(), MLP(), Takes()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.between(self.first(x)))
        return y


FEATURES = rows(4, WIDTH)

ARCHITECTURES = (
    describe("trap", InPlace, FEATURES),
    describe("trap", InPlaceOnInput, FEATURES),
    describe("trap", RunningMean, FEATURES),
    describe("trap", BufferReplaced, FEATURES),
    describe("trap", MovingWeights, FEATURES),
    describe("trap", Queue, FEATURES),
    describe("trap", LazyCache, FEATURES),
    describe("trap", CountsSteps, FEATURES),
    describe("trap", RemembersLast, FEATURES),
    describe("trap", ForwardHook, FEATURES),
    describe("trap", LeafHook, FEATURES),
    describe("trap", CollectsByHook, FEATURES),
    describe("trap", CalledTwice, FEATURES),
    describe("trap", ChangesParameter, FEATURES),
    describe("trap", PlainTensor, FEATURES),
    describe("trap", UnregisteredTie, texts()),
    describe("trap", SharesGlobal, FEATURES),
)
