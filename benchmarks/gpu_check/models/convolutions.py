"""EfficientNet: depthwise convolutions, and a gate for every channel."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Expansion, filter, stride, channels and repeats of B0 (Tan and Le 2019, table 1)."""


class Gate(nn.Module):
    """Squeeze-and-excitation (Hu et al. 2018): scale channels by weights made of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = functional.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(functional.silu(self.squeeze(means))))


class MBConv(nn.Module):
    """Widen, convolve every channel by itself, gate and narrow again."""

    def __init__(self, expansion: int, size: int, stride: int, channels: int, out: int) -> None:
        super().__init__()
        inner = expansion * channels
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += _normed(channels, inner, 1)
        layers += _normed(inner, inner, size, stride=stride, groups=inner)
        layers.append(Gate(inner, max(1, channels // 4)))
        layers += [nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.body = nn.Sequential(*layers)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


class EfficientNet(nn.Module):
    """B0, made wider and deeper."""

    def __init__(self, *, width: float, depth: float, num_classes: int) -> None:
        super().__init__()
        channels = _rounded(32 * width)
        self.stem = nn.Sequential(*_normed(3, channels, 3, stride=2))
        blocks: list[nn.Module] = []
        for expansion, size, stride, base, repeats in BLOCKS:
            out = _rounded(base * width)
            for index in range(ceil(repeats * depth)):
                blocks.append(MBConv(expansion, size, 1 if index else stride, channels, out))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*_normed(channels, 4 * channels, 1))
        self.head = nn.Linear(4 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.blocks(self.stem(x)))
        scores: Tensor = self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))
        return scores


def _normed(
    channels: int, out: int, size: int, *, stride: int = 1, groups: int = 1
) -> Iterator[nn.Module]:
    yield nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(out)
    yield nn.SiLU(inplace=True)


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8, but at least 0.9 of the number asked for."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest
