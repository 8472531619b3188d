"""Image models written out here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .parts import ConvReLU, describe, rows


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut (He et al. 2016)."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.reduce = ConvReLU(channels, width, 1)
        self.conv = ConvReLU(width, width, 3, stride)
        self.expand = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, 4 * width, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.conv(self.reduce(x)))
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class Resnet50(nn.Module):
    """Three, four, six and three blocks, an eighth as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvReLU(3, 8, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        channels, stages = 8, []
        for width, count, stride in ((8, 3, 1), (16, 4, 2), (32, 6, 2), (64, 3, 2)):
            blocks = [Bottleneck(channels, width, stride)]
            blocks += [Bottleneck(4 * width, width) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
            channels = 4 * width
        self.stages = nn.Sequential(*stages)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(self.stem(x)))
        scores: Tensor = self.head(torch.flatten(self.average(x), 1))
        return scores


class VGG(nn.Module):
    """Convolutions, then wide layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 16, 32):
            layers += [ConvReLU(channels, width), ConvReLU(width, width), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(32 * 16, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


class UNet(nn.Module):
    """Every level's features are joined to those on the way back."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.down = nn.ModuleList(
            ConvReLU(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        self.middle = ConvReLU(32, 32)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 32), (32, 16), (16, 8))
        )
        self.join = nn.ModuleList(ConvReLU(2 * b, b) for b in (32, 16, 8))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([grow(x), skip], 1))
        scores: Tensor = self.head(x)
        return scores


class Branches(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.one = ConvReLU(channels, width, 1)
        self.three = nn.Sequential(ConvReLU(channels, width, 1), ConvReLU(width, width, 3))
        self.five = nn.Sequential(ConvReLU(channels, width, 1), ConvReLU(width, width, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvReLU(channels, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class Inception(nn.Module):
    """Four branches side by side, and a second head on the way that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvReLU(3, 8, 3, 2)
        self.first, self.second = Branches(8, 4), Branches(16, 8)
        self.auxiliary = nn.Linear(16, 10)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(self.stem(x))
        early = self.auxiliary(x.mean((2, 3)))
        return {"early": early, "scores": self.head(self.second(x).mean((2, 3)))}


class Densenet(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, growth: int = 4, count: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + growth * index),
                nn.ReLU(),
                nn.Conv2d(8 + growth * index, growth, 3, padding=1),
            )
            for index in range(count)
        )
        self.head = nn.Linear(8 + growth * count, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        scores: Tensor = self.head(torch.cat(features, 1).mean((2, 3)))
        return scores


class SqueezeExcite(nn.Module):
    """Depthwise convolutions whose channels are weighed by a small net (Hu et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvReLU(3, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Linear(16, 4), nn.Linear(4, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.depthwise(self.stem(x)))
        weight = torch.sigmoid(self.excite(functional.relu(self.squeeze(x.mean((2, 3))))))
        scores: Tensor = self.head((x * weight[:, :, None, None]).mean((2, 3)))
        return scores


class Autoencoder(nn.Module):
    """A variational one: noise is drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 2, 2), nn.ELU(), nn.ConvTranspose2d(8, 3, 2, 2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        spread = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return self.decoder(code), spread


class Mixer(nn.Module):
    """MLP-Mixer: mixes patches, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int = 16, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "patches": nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, 16)),
                    "channels": nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 16)),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block["patches"](block["norm"](x).transpose(1, 2)).transpose(1, 2)
            x = x + block["channels"](block["norm"](x))
        scores: Tensor = self.head(x.mean(1))
        return scores


class GAN(nn.Module):
    """A discriminator with spectral normalisation: its buffers change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.Sequential(
            normed(nn.Conv2d(3, 8, 3, 2, 1)), nn.LeakyReLU(0.2), normed(nn.Conv2d(8, 8, 3, 2, 1))
        )
        self.head = normed(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(x).mean((2, 3)))
        return scores


IMAGES = rows(4, 3, 32, 32)
SMALL = rows(4, 3, 16, 16)

ARCHITECTURES = (
    describe("vision", Resnet50, rows(4, 3, 64, 64)),
    describe("vision", VGG, IMAGES),
    describe("vision", UNet, SMALL),
    describe("vision", Inception, IMAGES),
    describe("vision", Densenet, SMALL),
    describe("vision", SqueezeExcite, SMALL),
    describe("vision", Autoencoder, SMALL),
    describe("vision", Mixer, SMALL),
    describe("vision", GAN, SMALL),
)
