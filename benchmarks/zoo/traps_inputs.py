"""Traps of inputs that are nests, of sparse gradients, TorchScript and checkpoints of others."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import Architecture
from .language import GPT2_SIZES, SIZES, causal
from .parts import MLP, WIDTH, describe


@dataclass
class Batch:
    x: Tensor
    scale: Tensor
    is_scaled: bool = True


class DictInput(nn.Module):
    """Takes one argument, a dict with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        scores: Tensor = self.head(self.body(batch["x"])) * batch["more"][0]
        return scores


class DataclassInput(DictInput):
    """Takes one argument, an instance of a data class with a flag."""

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = self.head(self.body(batch.x))
        return scores * batch.scale if batch.is_scaled else scores


class NoneAndNumberInput(DictInput):
    """Is given None for a mask, a number and a text."""

    def forward(self, x: Any, mask: Tensor | None, factor: float = 1.0, how: str = "sum") -> Tensor:
        scores: Tensor = self.head(self.body(x)) * (factor if how == "product" else 1.0)
        return scores if mask is None else scores * mask


class SparseEmbedding(nn.Module):
    """The gradient of its embedding is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH, sparse=True)
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.tokens(ids)))
        return scores


class BooleanIndex(nn.Module):
    """Works on the samples that a mask of its own selects."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.some, self.head = MLP(), MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        mask = x.sum(-1) > 0
        y = x.clone()
        y[mask] = self.some(x[mask])
        scores: Tensor = self.head(y)
        return scores


class BooleanSelection(BooleanIndex):
    """Returns a mean over as many samples as a mask of its own selects."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        y = self.some(torch.cat([x[x.sum(-1) > 0], x[:1]]))
        scores: Tensor = self.head(x + y.mean(0))
        return scores


class ScriptChild(nn.Module):
    """Has a child that is TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.body, self.script, self.head = MLP(), script, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.script(self.body(x)))
        return scores


def checkpointed(kind: str, sizes: dict[str, Any], *, reentrant: bool) -> nn.Module:
    """Return a language model with gradient checkpointing enabled."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model: Any = getattr(transformers, f"{kind}{head}")(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found: nn.Module = model
    return found


def _nest() -> tuple[dict[str, Any]]:
    return ({"x": torch.randn(4, WIDTH), "more": [torch.rand(4, 1)]},)


ARCHITECTURES = (
    Architecture(
        "gpt2-checkpointed", "transformers",
        lambda: checkpointed("GPT2", GPT2_SIZES, reentrant=True), causal,
    ),
    Architecture(
        "llama-checkpointed", "transformers",
        lambda: checkpointed("Llama", SIZES, reentrant=False), causal,
    ),
    describe("trap", DictInput, _nest),
    describe("trap", DataclassInput, lambda: Batch(torch.randn(4, WIDTH), torch.rand(4, 1))),
    describe("trap", NoneAndNumberInput, lambda: (torch.randn(4, WIDTH), None, 0.5, "product")),
    describe("trap", SparseEmbedding, lambda: torch.randint(0, 16, (4, 3))),
    describe("trap", BooleanIndex, lambda: torch.randn(8, WIDTH), seeds=6),
    describe("trap", BooleanSelection, lambda: torch.randn(8, WIDTH), seeds=6),
    describe("trap", ScriptChild, lambda: torch.randn(4, WIDTH)),
)  # fmt: skip
