"""Blocks that several of the hand-written architectures share."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .architecture import Architecture, Kind

WIDTH = 16


def rows(*shape: int) -> Callable[[], Tensor]:
    """Return a sample of one random tensor."""
    return lambda: torch.randn(*shape)


def texts(vocabulary: int = 32, batch: int = 2, length: int = 8) -> Callable[[], Tensor]:
    """Return a sample of token numbers."""
    return lambda: torch.randint(0, vocabulary, (batch, length))


def describe(
    kind: Kind, build: Callable[[], nn.Module], sample: Callable[[], object], seeds: int = 2
) -> Architecture:
    """Return an architecture named after its class, whose docstring explains a trap."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", build.__name__).lower()
    trap = (build.__doc__ or "").splitlines()[0].rstrip(".") if kind in ("trap", "hostile") else ""
    return Architecture(name, kind, build, sample, seeds, trap)


class MLP(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fall(torch.relu(self.rise(self.norm(x))))
        return y


class ConvReLU(nn.Sequential):
    """Convolution, normalisation over the batch, ReLU in place."""

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )
