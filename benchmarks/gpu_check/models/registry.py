"""The eight models of the GPU check, each with one micro-batch and a loss.

Sizes are those of the published models; ``small`` keeps the shape of each and shrinks every size,
to try the check where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_check.models.convolutions import EfficientNet
from benchmarks.gpu_check.models.experts import Switch
from benchmarks.gpu_check.models.transformers import GPT2, Bert, Llama, ViT
from stagewright.core.models.families import ResNetConfig, UNetConfig
from stagewright.profiler.models.resnet import ResNet
from stagewright.profiler.models.unet import UNet


@dataclass(frozen=True)
class Studied:
    """A model, one micro-batch by name, what the loss is taken against, and the loss."""

    model: nn.Module
    sample: dict[str, Tensor]
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def gpt2_medium(small: bool) -> Studied:
    """GPT-2 with 24 blocks of width 1,024 (Radford et al. 2019, table 2): 355 million weights."""
    blocks, width, heads, vocabulary, tokens, batch = (
        (6, 64, 4, 256, 64, 2) if small else (24, 1024, 16, 50257, 1024, 4)
    )
    model = GPT2(blocks=blocks, width=width, heads=heads, vocabulary=vocabulary, tokens=tokens)
    return _language(model, vocabulary, batch, tokens)


def llama_1b(small: bool) -> Studied:
    """Return the sizes of Llama 3.2 1B, as in its published configuration: 1.2 billion weights."""
    model = (
        Llama(blocks=6, width=64, heads=4, key_heads=2, inner=192, vocabulary=256)
        if small
        else Llama(blocks=16, width=2048, heads=32, key_heads=8, inner=8192, vocabulary=128256)
    )
    return _language(model, 256, 2, 64) if small else _language(model, 128256, 1, 2048)


def resnet50(small: bool) -> Studied:
    """ResNet-50 (He et al. 2016) on 32 images of 224 by 224."""
    width, size, batch, classes = (8, 64, 4, 10) if small else (64, 224, 32, 1000)
    model = ResNet(ResNetConfig(depth=50, width=width, num_classes=classes))
    return _images(model, "x", batch, size, classes)


def vit_large(small: bool) -> Studied:
    """ViT-L/16 (Dosovitskiy et al. 2021, table 1) on 32 images of 224 by 224."""
    blocks, width, heads, size, patch, batch, classes = (
        (6, 64, 4, 32, 8, 2, 10) if small else (24, 1024, 16, 224, 16, 32, 1000)
    )
    model = ViT(
        blocks=blocks, width=width, heads=heads, size=size, patch=patch, num_classes=classes
    )
    return _images(model, "images", batch, size, classes)


def bert_large(small: bool) -> Studied:
    """BERT-large (Devlin et al. 2019) on 8 texts of 512 tokens: 336 million weights."""
    blocks, width, heads, vocabulary, tokens, batch = (
        (6, 64, 4, 256, 64, 2) if small else (24, 1024, 16, 30522, 512, 8)
    )
    model = Bert(blocks=blocks, width=width, heads=heads, vocabulary=vocabulary, tokens=tokens)
    sample = torch.randint(0, vocabulary, (batch, tokens))
    return Studied(model, {"tokens": sample}, sample, _each_token)


def unet(small: bool) -> Studied:
    """U-Net (Ronneberger et al. 2015), 64 wide, on 8 images of 256 by 256."""
    width, size, batch = (8, 32, 2) if small else (64, 256, 8)
    model = UNet(UNetConfig(width=width, num_classes=2))
    images = torch.randn(batch, 3, size, size)
    return Studied(model, {"x": images}, torch.randint(0, 2, (batch, size, size)), _classes)


def efficientnet_b4(small: bool) -> Studied:
    """EfficientNet-B4 (Tan and Le 2019) on 16 images of 380 by 380: 19 million weights."""
    width, depth, size, batch, classes = (
        (0.25, 0.4, 32, 2, 10) if small else (1.4, 1.8, 380, 16, 1000)
    )
    model = EfficientNet(width=width, depth=depth, num_classes=classes)
    return _images(model, "x", batch, size, classes)


def switch_base(small: bool) -> Studied:
    """Return a decoder of Switch-Base's sizes with 8 experts, on 8 texts of 512 tokens."""
    blocks, width, heads, experts, vocabulary, tokens, batch = (
        (4, 64, 4, 4, 256, 64, 2) if small else (12, 768, 12, 8, 32128, 512, 8)
    )
    model = Switch(
        blocks=blocks, width=width, heads=heads, num_experts=experts, vocabulary=vocabulary,
        tokens=tokens,
    )  # fmt: skip
    return _language(model, vocabulary, batch, tokens)


MODELS: dict[str, Callable[[bool], Studied]] = {
    "gpt2-medium": gpt2_medium,
    "resnet50": resnet50,
    "llama-1b": llama_1b,
    "vit-large": vit_large,
    "bert-large": bert_large,
    "unet": unet,
    "efficientnet-b4": efficientnet_b4,
    "switch-base": switch_base,
}


def _language(model: nn.Module, vocabulary: int, batch: int, tokens: int) -> Studied:
    sample = torch.randint(0, vocabulary, (batch, tokens))
    return Studied(model, {"tokens": sample}, sample, _next_token)


def _images(model: nn.Module, name: str, batch: int, size: int, classes: int) -> Studied:
    images = torch.randn(batch, 3, size, size)
    return Studied(model, {name: images}, torch.randint(0, classes, (batch,)), _classes)


def _next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _each_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _classes(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels)
