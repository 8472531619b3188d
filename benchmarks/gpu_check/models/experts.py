"""Switch transformer (Fedus et al. 2022): every other block sends each token to one expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_check.models.transformers import Attention, Block


class Experts(nn.Module):
    """Feed-forward experts with room for a fixed number of tokens each, so that shapes are fixed.

    Tokens beyond an expert's room go to a row past the last one and come back as zeros.
    """

    def __init__(self, width: int, inner: int, num_experts: int, room: float = 1.25) -> None:
        super().__init__()
        self.room = room
        self.router = nn.Linear(width, num_experts, bias=False)
        self.rise = nn.Parameter(torch.randn(num_experts, width, inner) * width**-0.5)
        self.fall = nn.Parameter(torch.randn(num_experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count, width = self.rise.shape[:2]
        rows = int(self.room * tokens.shape[0] / count)
        gate, expert = torch.softmax(self.router(tokens).float(), -1).max(-1)
        chosen = functional.one_hot(expert, count)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        row = torch.where(place < rows, expert * rows + place, count * rows)
        taken = tokens.new_zeros(count * rows + 1, width).index_add(0, row, tokens)
        inside = taken[:-1].view(count, rows, width)
        made = torch.bmm(functional.gelu(torch.bmm(inside, self.rise)), self.fall).flatten(0, 1)
        padded = torch.cat([made, made.new_zeros(1, width)])
        return (padded[row] * gate.to(x.dtype)[:, None]).view_as(x)


class SwitchBlock(nn.Module):
    def __init__(self, width: int, heads: int, num_experts: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = Experts(width, 4 * width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        y: Tensor = x + self.feed(self.norm_feed(x))
        return y


class Switch(nn.Module):
    """Decoder; head tied to the embedding."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, num_experts: int, vocabulary: int, tokens: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(
            SwitchBlock(width, heads, num_experts)
            if index % 2
            else Block(width, heads, causal=True)
            for index in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
