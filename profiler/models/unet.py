"""U-Net (Ronneberger et al. 2015): an encoder and a decoder joined by long skip connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.models.families import UNetConfig


class DoubleConv(nn.Module):
    """Two 3x3 convolutions with batch normalisation, same height and width."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


class UNet(nn.Module):
    """``(batch, in_channels, h, w)`` to ``(batch, num_classes, h, w)``; h, w divide 2**depth."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.depth + 1)]
        self.stem = DoubleConv(config.in_channels, widths[0])
        self.pool = nn.MaxPool2d(2)
        self.downs = nn.ModuleList(
            DoubleConv(widths[level], widths[level + 1]) for level in range(config.depth)
        )
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(widths[level + 1], widths[level], 2, 2)
            for level in reversed(range(config.depth))
        )
        self.joins = nn.ModuleList(
            DoubleConv(2 * widths[level], widths[level]) for level in reversed(range(config.depth))
        )
        self.head = nn.Conv2d(widths[0], config.num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for down in self.downs:
            skips.append(down(self.pool(skips[-1])))
        y = skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            y = join(torch.cat([skips.pop(), up(y)], dim=1))
        scores: Tensor = self.head(y)
        return scores
