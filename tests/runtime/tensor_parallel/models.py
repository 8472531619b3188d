"""Small models whose layers ranks can share, in double precision, with a sample and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64


@dataclass(frozen=True)
class Example:
    """A model, a sample of one micro-batch, its target and a loss."""

    name: str
    model: nn.Module
    sample: Any
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]

    def draw_batch(self, microbatches: int, seed: int = 1) -> tuple[dict[str, Tensor], Tensor]:
        """Return a batch of as many micro-batches, by keyword, and its target."""
        torch.manual_seed(seed)
        return (
            {name: _redraw(value, microbatches) for name, value in self.sample.items()},
            _redraw(self.target, microbatches, limit=int(self.target.max()) + 1),
        )


def _redraw(value: Tensor, times: int, limit: int = VOCABULARY) -> Tensor:
    shape = (value.shape[0] * times, *value.shape[1:])
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype)
    return torch.randint(0, limit, shape)


def make_example(name: str, *, dropout: float = 0.0) -> Example:
    """Return one of `MAKERS`, drawn from a fixed seed."""
    torch.manual_seed(0)
    made = MAKERS[name](dropout)
    return Example(name, made[0].double(), *made[1:])


def _language(model: nn.Module, *inputs: str) -> tuple[Any, ...]:
    model.config.use_cache = False
    ids = torch.randint(0, VOCABULARY, (2, 6))

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    target = torch.arange(12).reshape(2, 6) % VOCABULARY
    target[0, 0] = VOCABULARY - 1
    return model, {name: ids for name in inputs}, target, loss_fn


def _gpt2(dropout: float) -> tuple[Any, ...]:
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip
    return _language(hf.GPT2LMHeadModel(config), "input_ids")


def _llama(dropout: float) -> tuple[Any, ...]:
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return _language(hf.LlamaForCausalLM(config), "input_ids")


def _mixtral(dropout: float) -> tuple[Any, ...]:
    hf = pytest.importorskip("transformers")
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return _language(hf.MixtralForCausalLM(config), "input_ids")


def _t5(dropout: float) -> tuple[Any, ...]:
    hf = pytest.importorskip("transformers")
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        dropout_rate=dropout,
    )  # fmt: skip
    return _language(hf.T5ForConditionalGeneration(config), "input_ids", "decoder_input_ids")


class Bottleneck(nn.Module):
    """A block of ResNeXt: a grouped convolution between two of one pixel."""

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, channels, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.reduce(x)))
        y = self.relu(self.second_norm(self.grouped(y)))
        return self.relu(self.last_norm(self.expand(y)) + x)


class ResNeXt(nn.Module):
    """A stem, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Bottleneck(8, 16, 8) for _ in range(3))
        self.head = nn.Linear(8, 12)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _resnext(dropout: float) -> tuple[Any, ...]:
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    return ResNeXt(), {"images": images}, torch.tensor([1, 11]), F.cross_entropy


class GroupedAttention(nn.Module):
    """A block whose keys and values have half as many heads as the queries, and are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            each(y).view(*y.shape[:2], -1, 2).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(made.transpose(1, 2).reshape(y.shape))


def _sequential(dropout: float) -> tuple[Any, ...]:
    blocks = [GroupedAttention() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), *blocks, nn.Linear(16, VOCABULARY))
    ids = torch.randint(0, VOCABULARY, (2, 6))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return model, {"input": ids}, torch.arange(12).reshape(2, 6), loss_fn


MAKERS: dict[str, Callable[[float], tuple[Any, ...]]] = {
    "gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "t5": _t5, "resnext": _resnext,
    "sequential": _sequential,
}  # fmt: skip
