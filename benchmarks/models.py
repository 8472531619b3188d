"""Seven models of different shapes, each with a micro-batch and a loss, to be measured.

Small enough that one core measures them all in four minutes; the shapes are the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    ModelSpec,
    ResNetConfig,
    ResNetSpec,
    UNetConfig,
    UNetSpec,
)
from stagewright.profiler.models.families import build_loss, build_model, class_loss

CLASSES = 1000
VOCABULARY = 16384


@dataclass(frozen=True)
class Measured:
    """A model with everything the profiler needs.

    Attributes:
        sample: One micro-batch, by the names of ``forward``; a tensor for an ``nn.Sequential``.
    """

    model: nn.Module
    sample: Any
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]


def gpt2() -> Measured:
    """GPT-2 small: 12 equal blocks, then a head three times as long, tied to the embedding."""
    tokens = torch.randint(0, 50257, (1, 128))
    return _family(GPT2Spec(family="gpt2", config=GPT2Config()), {"input_ids": tokens}, tokens)


def resnet50() -> Measured:
    """Blocks of similar work, parameters at the back, activations in front."""
    spec = ResNetSpec(family="resnet", config=ResNetConfig())
    return _family(spec, {"x": torch.randn(4, 3, 96, 96)}, _labels(4))


def unet() -> Measured:
    """Skip connections across the whole model: every cut but the last sends several tensors."""
    spec = UNetSpec(family="unet", config=UNetConfig(width=16, depth=4))
    images, labels = torch.randn(2, 3, 96, 96), torch.randint(0, 2, (2, 96, 96))
    return _family(spec, {"x": images}, labels)


def inception() -> Measured:
    """GoogLeNet's nine modules of four branches."""
    return Measured(Inception(), {"x": torch.randn(4, 3, 96, 96)}, _labels(4), class_loss)


def moe() -> Measured:
    """Return a language model that has eight experts in every second block."""
    tokens = torch.randint(0, VOCABULARY, (2, 128))
    model = LanguageModel(width=256, blocks=12, heads=4, experts=8)
    return Measured(model, {"tokens": tokens}, tokens, next_token_loss)


def two_tower() -> Measured:
    """Return an image and a text encoder joined at the end, as in CLIP."""
    sample = {
        "image": torch.randn(4, 3, 96, 96),
        "tokens": torch.randint(0, VOCABULARY, (4, 32)),
    }
    return Measured(TwoTower(), sample, torch.arange(4), contrastive_loss)


def vgg() -> Measured:
    """VGG-16: a few early convolutions do the work, two late layers have the parameters."""
    return Measured(_vgg16(), torch.randn(4, 3, 64, 64), _labels(4), class_loss)


MODELS: dict[str, Callable[[], Measured]] = {
    "gpt2": gpt2,
    "resnet50": resnet50,
    "unet": unet,
    "inception": inception,
    "moe": moe,
    "two_tower": two_tower,
    "vgg": vgg,
}


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def contrastive_loss(similarity: Tensor, matches: Tensor) -> Tensor:
    """Every image finds its text, every text its image."""
    there = functional.cross_entropy(similarity, matches)
    return (there + functional.cross_entropy(similarity.T, matches)) / 2


def _family(spec: ModelSpec, sample: dict[str, Tensor], target: Tensor) -> Measured:
    return Measured(build_model(spec), sample, target, build_loss(spec))


def _labels(count: int) -> Tensor:
    return torch.randint(0, CLASSES, (count,))


class ConvReLU(nn.Sequential):
    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        )


class InceptionModule(nn.Module):
    """1x1, 3x3, 5x5 and pooling side by side (Szegedy et al. 2015)."""

    def __init__(
        self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.one = ConvReLU(channels, one, 1)
        self.three = nn.Sequential(ConvReLU(channels, three[0], 1), ConvReLU(*three, 3))
        self.five = nn.Sequential(ConvReLU(channels, five[0], 1), ConvReLU(*five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvReLU(channels, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class Inception(nn.Module):
    """Table 1 of the paper, without the auxiliary heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvReLU(3, 64, 7, 2),
            nn.MaxPool2d(3, 2, 1),
            ConvReLU(64, 64, 1),
            ConvReLU(64, 192, 3),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(
            InceptionModule(192, 64, (96, 128), (16, 32), 32),
            InceptionModule(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, 2, 1),
            InceptionModule(480, 192, (96, 208), (16, 48), 64),
            InceptionModule(512, 160, (112, 224), (24, 64), 64),
            InceptionModule(512, 128, (128, 256), (24, 64), 64),
            InceptionModule(512, 112, (144, 288), (32, 64), 64),
            InceptionModule(528, 256, (160, 320), (32, 128), 128),
            nn.MaxPool2d(3, 2, 1),
            InceptionModule(832, 256, (160, 320), (32, 128), 128),
            InceptionModule(832, 384, (192, 384), (48, 128), 128),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(1024, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.blocks(self.stem(x))).flatten(1))
        return scores


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Experts(nn.Module):
    """Every token goes to one of several feed-forward nets, at most ``capacity`` to each.

    Dispatched by a one-hot product, as GShard does it (Lepikhin et al. 2021); tokens beyond the
    capacity pass by. So shapes do not depend on the data.
    """

    def __init__(self, width: int, experts: int, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.experts, self.capacity_factor = experts, capacity_factor
        self.router = nn.Linear(width, experts)
        self.rise = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.fall = nn.Parameter(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        capacity = int(self.capacity_factor * tokens.shape[0] / self.experts)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        chosen = functional.one_hot(choice, self.experts)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        fits = (place < capacity).to(x.dtype)
        slot = functional.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype)
        dispatch = torch.einsum("te,tc->tec", chosen.to(x.dtype), slot * fits[:, None])
        inside = torch.einsum("tec,td->ecd", dispatch, tokens)
        outside = functional.gelu(inside @ self.rise) @ self.fall
        combine = dispatch * weight[:, None, None]
        return torch.einsum("tec,ecd->td", combine, outside).view_as(x)


class Block(nn.Module):
    """A transformer block; with experts its feed-forward part is a mixture of them."""

    def __init__(self, width: int, heads: int, *, experts: int = 0, causal: bool = True) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = (
            Experts(width, experts)
            if experts
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        y: Tensor = x + self.feed(self.norm_feed(x))
        return y


class LanguageModel(nn.Module):
    def __init__(self, *, width: int, blocks: int, heads: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.Sequential(
            *(Block(width, heads, experts=experts * (index % 2)) for index in range(blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions)))
        return logits


class TwoTower(nn.Module):
    """A vision transformer and a smaller text transformer; cosines of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 8, 8)
        self.image_blocks = nn.Sequential(*(Block(384, 6, causal=False) for _ in range(8)))
        self.image_head = nn.Linear(384, 256)
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.text_blocks = nn.Sequential(*(Block(256, 4) for _ in range(6)))
        self.text_head = nn.Linear(256, 256)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        seen = self.image_head(self.image_blocks(patches).mean(1))
        read = self.text_head(self.text_blocks(self.embedding(tokens))[:, -1])
        similarity: Tensor = (
            functional.normalize(seen, dim=-1) @ functional.normalize(read, dim=-1).T
        )
        return similarity


def _vgg16() -> nn.Sequential:
    """Return configuration D (Simonyan and Zisserman 2015) for 64 x 64 pixels."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for size in (512 * 2 * 2, 4096):
        layers += [nn.Linear(size, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))
