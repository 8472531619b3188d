"""Blocks that the conformance models are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Step(nn.Sequential):
    """Ends in an operation that keeps its own output for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fall(torch.tanh(self.rise(self.norm(x))))
        return y


class Experts(nn.Module):
    """Two experts mixed by a router, whose balance loss waits in an attribute."""

    balance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        self.balance = 2 * shares.mean(0).square().sum()
        y: Tensor = shares[:, :1] * self.first(x) + shares[:, 1:] * self.second(x)
        return y


class Residual(nn.Module):
    """Convolution and BatchNorm twice, beside a way around."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.last_norm(self.second(y)))


class Double(nn.Module):
    """A U-Net's step at one size."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


class Attention(nn.Module):
    """Of one sequence to another or to itself; no biases, as a key's has no gradient."""

    HEADS = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, memory: Tensor, bias: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        keys, values = self.key_value(memory).chunk(2, -1)
        mixed = functional.scaled_dot_product_attention(
            self._heads(self.query(x)),
            self._heads(keys),
            self._heads(values),
            attn_mask=bias,
            is_causal=causal,
        )
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.HEADS, -1))
        return heads.transpose(1, 2)


class TransformerBlock(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.feed_forward = Block(width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        y: Tensor = self.feed_forward(x + self.attention(normed, normed, bias, self.causal))
        return y


class CrossBlock(nn.Module):
    """A decoder's block: looks back on itself, then at the encoder's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.itself = TransformerBlock(width, causal=True)
        self.norm = nn.LayerNorm(width)
        self.across = Attention(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.itself(x)
        y: Tensor = x + self.across(self.norm(x), memory)
        return y
