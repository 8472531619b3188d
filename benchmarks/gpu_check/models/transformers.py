"""Transformers: GPT-2, BERT, Llama and ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Queries, keys and values from one projection, with dropout inside."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.drop_attention, self.drop_feed = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_attention(self.attention(self.norm_attention(x)))
        y: Tensor = x + self.drop_feed(self.feed(self.norm_feed(x)))
        return y


class GPT2(nn.Module):
    """Learned positions, dropout, head tied to the embedding."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, vocabulary: int, tokens: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=True, dropout=0.1) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class BertBlock(nn.Module):
    """Norms behind the sums, as in the original transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=False, dropout=0.1)
        self.norm_attention = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm_feed = nn.LayerNorm(width)
        self.drop_attention, self.drop_feed = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_attention(x + self.drop_attention(self.attention(x)))
        y: Tensor = self.norm_feed(x + self.drop_feed(self.feed(x)))
        return y


class Bert(nn.Module):
    """Encoder with the head of the masked language model, tied to the embedding."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, vocabulary: int, tokens: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(BertBlock(width, heads) for _ in range(blocks))
        self.turn = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.norm(self.embedding(tokens) + self.positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.turn(x))
        return logits


class GatedBlock(nn.Module):
    """Rotary positions, several queries to a key, gated feed-forward (Touvron et al. 2023)."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm_attention, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.rise = nn.Linear(width, inner, bias=False)
        self.fall = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = self.norm_attention(x)
        query = _rotated(self._by_head(self.query(y)), cosine, sine)
        key = _rotated(self._by_head(self.key(y)), cosine, sine)
        value = self._by_head(self.value(y))
        repeats = self.heads // self.key_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(repeats, 1),
            value.repeat_interleave(repeats, 1),
            is_causal=True,
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        y = self.norm_feed(x)
        z: Tensor = x + self.fall(functional.silu(self.gate(y)) * self.rise(y))
        return z

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


class Llama(nn.Module):
    """Head tied to the embedding, as in the 1B model."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, key_heads: int, inner: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            GatedBlock(width, heads, key_heads, inner) for _ in range(blocks)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        size = width // heads
        rates = 500000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("rates", torch.cat([rates, rates]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = places[:, None] * self.rates.float()
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ViT(nn.Module):
    """Patches, a class token, learned positions; scores from the class token."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, size: int, patch: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros((size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(patches.shape[0], -1, -1)
        x = torch.cat([token, patches], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores
