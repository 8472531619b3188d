"""Small models whose activations are as entangled as those of large ones.

Every way a layer can keep memory is in one of them: dropout masks, batch statistics, attention by
both paths, views, operations in place, recomputed blocks, autograd functions that save by name and
by attribute, recurrent layers, skips across the model, ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stagewright.core.models.families import GPT2Config, GPT2Spec, ResNetConfig, UNetConfig
from stagewright.profiler.models.families import build_model, class_loss
from stagewright.profiler.models.resnet import ResNet
from stagewright.profiler.models.unet import UNet

VOCABULARY = 512


@dataclass(frozen=True)
class Subject:
    """A model with one micro-batch and a loss.

    Attributes:
        sample: A tensor for an ``nn.Sequential``, else inputs by name.
    """

    model: nn.Module
    sample: Any
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]


def gpt2() -> Subject:
    """Twelve blocks with dropout everywhere, tied head, attention in one kernel."""
    config = GPT2Config(n_layer=12, n_embd=96, n_head=4, vocab_size=VOCABULARY, n_positions=128)
    tokens = torch.randint(0, VOCABULARY, (4, 96))
    model = build_model(GPT2Spec(family="gpt2", config=config))
    return Subject(model, {"input_ids": tokens}, tokens, next_token)


def llama() -> Subject:
    """Rotary positions, grouped keys, gated feed-forward: attention by its steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        use_cache=False,
        attn_implementation="eager",
    )
    tokens = torch.randint(0, VOCABULARY, (4, 64))
    return Subject(LlamaForCausalLM(config), {"input_ids": tokens}, tokens, next_token)


def resnet() -> Subject:
    """ResNet-50's blocks at an eighth of the width: batch statistics, ReLU in place."""
    model = ResNet(ResNetConfig(depth=50, width=8, num_classes=10))
    return Subject(model, {"x": torch.randn(8, 3, 64, 64)}, torch.randint(0, 10, (8,)), class_loss)


def unet() -> Subject:
    """Skips across the whole model: a cut anywhere relays several tensors."""
    model = UNet(UNetConfig(width=8, depth=4))
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 64, 64))
    return Subject(model, {"x": images}, labels, class_loss)


def lstm() -> Subject:
    """Six recurrent layers with dropout between them."""
    tokens = torch.randint(0, VOCABULARY, (8, 48))
    return Subject(Recurrent(), {"tokens": tokens}, tokens, next_token)


def mixed() -> Subject:
    """Recomputed blocks, functions of its own, operations in place, views, normalisation."""
    sample, target = torch.randn(4, 64, 64), torch.randint(0, 10, (4,))
    return Subject(_mixed_blocks(), sample, target, class_loss)


MODELS: dict[str, Callable[[], Subject]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "mixed": mixed,
}


def next_token(output: Any, tokens: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Recurrent(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True, bidirectional=index % 3 == 2)
            for index in range(depth)
        )
        self.joins = nn.ModuleList(
            nn.Sequential(nn.Linear(width * (2 if index % 3 == 2 else 1), width), nn.Dropout(0.2))
            for index in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, join in zip(self.layers, self.joins, strict=True):
            x = x + join(layer(x)[0])
        scores: Tensor = self.head(x)
        return scores


class SavedByName(torch.autograd.Function):
    """x * sigmoid(x), keeping its input the way the manual says."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradients[0] * gate * (1 + x * (1 - gate))


class SavedByAttribute(torch.autograd.Function):
    """The same, keeping gate and product as attributes, past every hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gate = x.sigmoid()
        ctx.kept = x * (1 - ctx.gate)
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.gate * (1 + ctx.kept)


class ByName(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = SavedByName.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


class ByAttribute(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = SavedByAttribute.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


class Recomputed(nn.Module):
    """A feed-forward block that keeps its input alone.

    It draws no random numbers, so it need not keep the generator's state either: 5,056 bytes of
    the host's memory, which no table counts.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)
        return y


class Heads(nn.Module):
    """Attention that reads three views of one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        y: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return y


class InPlace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu_(self.linear(x))
        y = self.drop(self.norm(y.transpose(1, 2)).transpose(1, 2))
        y += x
        return y


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _mixed_blocks(width: int = 64) -> nn.Sequential:
    """Each kind twice; as children of an ``nn.Sequential`` they are run as written."""
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: Recomputed(width),
        lambda: ByName(width),
        lambda: Heads(width, 4),
        lambda: InPlace(width),
        lambda: ByAttribute(width),
    )
    blocks = [make() for _ in range(2) for make in kinds]
    return nn.Sequential(*blocks, Mean(), nn.Linear(width, 10))
