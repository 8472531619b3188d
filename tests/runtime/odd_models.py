"""Small models that do what real ones do and tracers stumble over."""

import torch
from torch import nn
from torch.nn import functional


class Base(nn.Module):
    """Three layers and a buffer; subclasses say what happens between."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))


class IndexAssignment(Base):
    def forward(self, x):
        out = torch.zeros(x.shape[0], 12)
        h = self.a(x)
        out[:, :4] = h
        h = self.b(h)
        out[:, 4:8] = h
        out[:, 8:] = self.c(h)
        return out


class ReturnsWeight(Base):
    """Returns a weight of its first layer, too, as contrastive models return a temperature."""

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), self.a.weight


class AverageWithoutGradient(Base):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.c(self.b(h) + self.seen)


class AverageReplaced(Base):
    def forward(self, x):
        h = self.a(x)
        self.seen = 0.9 * self.seen + 0.1 * h.detach().mean(0)
        return self.c(self.b(h))


class Autocast(Base):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.0)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.drop(self.norm(self.a(x)))
        return self.c(self.b(h.to(x.dtype)))


class FrozenBackbone(Base):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.b(self.a(features))


class FrozenFirst(Base):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x):
        return self.c(functional.relu_(self.b(self.a(x))))


class TiedThrice(Base):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)).relu()).tanh()


class TwoNames(Base):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = self.first

    def forward(self, x):
        return self.c(self.second(self.b(self.first(self.a(x)))))


class SeveralOutputs(Base):
    def forward(self, x):
        h = self.a(x)
        y = self.b(h)
        return {"y": self.c(y), "hidden": (h, y), "none": None, "number": 3}


class MinusInfinity(Base):
    def forward(self, x):
        scores = self.c(self.b(self.a(x)))
        blocked = ~torch.eye(4, dtype=torch.bool)[: x.shape[0]]
        return scores.masked_fill(blocked, float("-inf")).softmax(-1)


class InPlaceInput(Base):
    def forward(self, x):
        x.mul_(2)
        return self.b(self.a(x))


class CalledAgain(Base):
    def forward(self, x):
        return self.a(self.b(self.a(x)))


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.c(self.lstm(self.a(x).unsqueeze(1))[0].squeeze(1))


class SkipInPlace(Base):
    def forward(self, x):
        h = self.a(x)
        skip = h
        y = self.b(h.relu_())
        return self.c(y.add_(skip))


class _AddInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x += 1
        return self.fc(x)


def shared_relu():
    """One module in two places of an ``nn.Sequential``."""
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 4))


def in_place_children():
    """Children whose Python works in place, where no flag says so."""
    return nn.Sequential(nn.Linear(4, 4), _AddInPlace(), _AddInPlace())


EQUAL = [
    IndexAssignment, AverageWithoutGradient, AverageReplaced, Autocast, FrozenBackbone,
    FrozenFirst, TiedThrice, TwoNames, SeveralOutputs, MinusInfinity, InPlaceInput, CalledAgain,
    Recurrent, SkipInPlace, ReturnsWeight, shared_relu, in_place_children,
]  # fmt: skip
"""These compute the same in pieces."""


class DropPath(Base):
    def forward(self, x):
        h = self.a(x)
        if self.training:
            h = h * torch.empty(h.shape[0], 1).bernoulli_(0.5) / 0.5
        return self.b(h)


class Auxiliary(Base):
    def forward(self, x):
        h = self.a(x)
        return (self.b(h), h) if self.training else self.b(h)


class RegionDropout(Base):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = functional.dropout(self.a(x), 0.5, self.training)
        return self.b(h.to(x.dtype))


OWN_EVALUATION = [DropPath, RegionDropout]
"""Their traced forms run another graph in evaluation."""

KEEP_THEIR_MODE = [Auxiliary]
"""Their traced forms cannot be switched to evaluation, and must say so."""


class Hooked(Base):
    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return self.b(h)


class Clamped(Base):
    def forward(self, x):
        self.b.weight.data.clamp_(-1, 1)
        with torch.no_grad():
            self.b.weight.mul_(1.0)
        return self.b(self.a(x))


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.a(x) * self.count


WHOLE = [Hooked, Counting]
"""What these do escapes a tracer; they are called whole, and cannot be cut."""

REFUSED = [Clamped]
"""Tracing would change these."""


class ReadsReference(nn.Module):
    """Called as written; reads the weight of a layer that it only refers to."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        x = x / 2 if float(x.detach().sum()) > 1e6 else x
        return nn.functional.linear(x, self.other[0].weight)
