"""A small GPT and a small convolutional net, in float64, for training under other runtimes."""

from itertools import pairwise

import torch
from torch import nn

BATCH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(6))
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(self.norm(hidden))


def build_gpt() -> nn.Module:
    torch.manual_seed(1)
    return TinyGPT().double()


def build_cnn() -> nn.Module:
    torch.manual_seed(2)
    channels = [3, 4, 6, 6, 4, 4]
    layers: list[nn.Module] = []
    for first, last in pairwise(channels):
        layers += [nn.Conv2d(first, last, 3, padding=1), nn.GroupNorm(2, last), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5)).double()


class Logits(nn.Module):
    """Llama of transformers, whose rotary embedding runs under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 17}
        config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.llama(tokens, use_cache=False, return_dict=False)[0]


def build_llama() -> nn.Module:
    torch.manual_seed(8)
    return Logits().double()


def build_tied() -> nn.Module:
    """Embedding, a projection in the middle and the head, all of one weight."""
    torch.manual_seed(7)
    embedding, middle = nn.Embedding(17, 8), nn.Linear(8, 17)
    head = nn.Linear(8, 17)
    nn.init.normal_(embedding.weight, std=0.3)
    middle.weight = head.weight = embedding.weight
    body = (nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))
    return nn.Sequential(embedding, *body, middle, nn.Linear(17, 8), head).double()


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(17, (batch, 5), generator=torch.Generator().manual_seed(3))


def images(batch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(batch, 3, 6, 6, generator=draw, dtype=torch.float64)


def next_tokens(batch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(batch, 5, 17, generator=draw, dtype=torch.float64)


def labels(batch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(6)
    return torch.randn(batch, 5, generator=draw, dtype=torch.float64)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


MODELS = {
    "gpt": (build_gpt, tokens, next_tokens),
    "cnn": (build_cnn, images, labels),
    "llama": (build_llama, tokens, next_tokens),
    "tied": (build_tied, tokens, next_tokens),
}
"""Model, sample and target by name."""
