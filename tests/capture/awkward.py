"""Modules that do what tracers lose, freeze, flatten or refuse; each maps (N, 8) to (N, 8)."""

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Round(torch.autograd.Function):
    """Straight-through: rounds forwards, and lets gradients pass."""

    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


straight_through = Round.apply


class Doubled(torch.autograd.Function):
    """The newer form: the context is set up apart; the gradient is doubled."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)


class Quantised(Base):
    def forward(self, x):
        return straight_through(self.fc(x), 3)


class Reversed(Base):
    def forward(self, x):
        return Doubled.apply(self.fc(x))


class PythonChance(Base):
    def forward(self, x):
        return x + self.fc(x) if random.random() < 0.5 or not self.training else x


class TorchChance(Base):
    def forward(self, x):
        if self.training and torch.rand(()).item() < 0.5:
            return x
        return x + self.fc(x)


class Branch(Base):
    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x * 2


class Mixture(Base):
    """Hand-written routing: every expert gets the rows that chose it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place][:, None])
        return self.fc(out)


class Checkpointed(Base):
    use_reentrant = False

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def part(self, x):
        return self.drop(self.fc(x)).relu()

    def forward(self, x):
        return x + checkpoint(self.part, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) / self.calls


class Remembering(Base):
    last = None

    def forward(self, x):
        h = self.fc(x)
        y = h if self.last is None else h + self.last
        self.last = h.detach()
        return y


class GradientHook(Base):
    def forward(self, x):
        h = self.fc(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return h


class DropPath(Base):
    def forward(self, x):
        h = self.fc(x)
        return x + (h * torch.rand(x.shape[0], 1).lt(0.5) if self.training else h)


class AlphaDropout(Base):
    def forward(self, x):
        return functional.alpha_dropout(self.fc(x), 0.3, self.training)


class LazyCache(Base):
    def __init__(self):
        super().__init__()
        self.table, self.by_size = None, {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0)
        if x.shape[1] not in self.by_size:
            self.by_size[x.shape[1]] = torch.ones(8)
        return self.fc(x) + self.table * self.by_size[x.shape[1]]


OPAQUE = [
    PythonChance, TorchChance, Branch, Mixture, Counting, Remembering, GradientHook,
]  # fmt: skip
"""Called as written, and said to be."""

TRACED = [
    Quantised, Reversed, LazyCache, DropPath, AlphaDropout, Checkpointed, CheckpointedReentrant,
]  # fmt: skip
"""Traced like any other, in evaluation as a graph of its own where that differs."""


class Stack(nn.Module):
    """Three of a kind between two linear layers."""

    def __init__(self, kind):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
