"""ResNet for images (He et al. 2016, "Deep Residual Learning for Image Recognition")."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.models.families import ResNetConfig

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks per group, table 1 of the paper."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, or with ``bottleneck`` 1x1, 3x3 and 1x1, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        # The stride sits on the 3x3 convolution of a bottleneck (the "v1.5" placement).
        strides = (1, stride, 1) if bottleneck else (stride, 1)
        widths = (channels, width, width, out) if bottleneck else (channels, width, out)
        self.convs = nn.ModuleList(
            nn.Conv2d(widths[i], widths[i + 1], k, strides[i], k // 2, bias=False)
            for i, k in enumerate(kernels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in widths[1:])
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for position, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if position < len(self.convs) - 1:
                y = self.relu(y)
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """``(batch, in_channels, height, width)`` images to ``(batch, num_classes)`` scores."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        bottleneck = config.depth >= 50
        width = config.width
        self.conv1 = nn.Conv2d(config.in_channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for group, count in enumerate(BLOCKS[config.depth]):
            blocks = []
            for index in range(count):
                stride = 2 if group and not index else 1
                size = width * 2**group
                blocks.append(ResidualBlock(channels, size, stride, bottleneck=bottleneck))
                channels = 4 * size if bottleneck else size
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for group in range(1, 5):
            x = self.get_submodule(f"layer{group}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores
