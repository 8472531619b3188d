"""Traps met in real training code: norms by hooks, frozen statistics, own operators."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.utils.checkpoint import checkpoint

from .parts import MLP, WIDTH, ConvReLU, describe, rows, texts
from .traps_gradients import Quantizer


class SpectralNormHooks(nn.Module):
    """The older spectral normalisation, done by a hook before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second, self.head = MLP(), spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.second(torch.relu(self.first(x))))
        return scores


class Pruned(nn.Module):
    """Masks are applied to weights by a hook before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), MLP()
        prune.l1_unstructured(self.first, "weight", amount=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Orthogonal(nn.Module):
    """A weight is kept orthogonal by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class FrozenStatistics(nn.Module):
    """train() leaves batch normalisation in evaluation mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = ConvReLU(3, 8), ConvReLU(8, 8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.drop(self.body(self.stem(x)).mean((2, 3))))
        return scores


class CumulativeStatistics(nn.Module):
    """Batch normalisation whose momentum is one over the number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm, self.after = nn.BatchNorm1d(WIDTH, momentum=None), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.norm(self.linear(x)))
        return y


class AuxiliaryHead(nn.Module):
    """Training returns two results, evaluation one, as torchvision's Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.auxiliary, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        scores = self.head(self.second(x))
        return (scores, self.auxiliary(x)) if self.training else scores


class RootHook(nn.Module):
    """The model itself has a hook that changes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)
        self.register_forward_hook(lambda module, given, result: 2 * result)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


class BackwardHook(nn.Module):
    """A block's backward hook changes the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.blocks[1].register_full_backward_hook(lambda module, given, _: (0.5 * given[0],))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ParameterHook(nn.Module):
    """A weight's hook masks its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), MLP()
        mask = (torch.arange(WIDTH) % 2).float()
        self.first.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class HyperNetwork(nn.Module):
    """One net makes the weights that another is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.made = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.made.weight + 0.1 * self.maker(x.mean(0)).view(4, WIDTH)
        scores: Tensor = self.after(torch.func.functional_call(self.made, {"weight": weight}, x))
        return scores


@functools.cache
def scripted_gelu() -> Callable[[Tensor], Tensor]:
    """Compiled when first wanted: it takes a moment."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    compiled: Callable[[Tensor], Tensor] = torch.jit.script(gelu)
    return compiled


class ScriptedPart(nn.Module):
    """An activation is compiled by torch.jit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), MLP()
        self.gelu = scripted_gelu()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.gelu(self.first(x)))
        return y


@functools.cache
def clipped_gradient() -> Callable[[Tensor], Tensor]:
    """Return an operator with a backward of its own, registered once."""

    def identity(x: Tensor) -> Tensor:
        return x.clone()

    operator = torch.library.custom_op("zoo::clipped_gradient", identity, mutates_args=())
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, gradient: gradient.clamp(-0.1, 0.1))
    return operator


class CustomOperator(nn.Module):
    """An operator registered with torch.library, its backward not the derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()
        clipped_gradient()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(clipped_gradient()(self.before(x)))
        return y


class StraightThroughCheckpointed(nn.Module):
    """An autograd function inside a recomputed block, where a look from outside misses it."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(MLP(), Quantizer()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class StraightThroughReentrant(StraightThroughCheckpointed):
    """The same by the older, reentrant implementation."""

    reentrant = True


class PatchedForward(nn.Module):
    """One block's forward is replaced on the instance, as accelerate does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        original = self.blocks[1].forward

        def patched(block: nn.Module, x: Tensor) -> Tensor:
            y: Tensor = 2 * original(x)
            return y

        self.blocks[1].forward = types.MethodType(patched, self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SharedBuffer(nn.Module):
    """Two modules hold the same buffer; one of them changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.BatchNorm1d(WIDTH), MLP(), nn.BatchNorm1d(WIDTH)
        self.second.running_mean = self.first.running_mean

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self.first(x)))
        return y


class ReturnsParameter(nn.Module):
    """A weight is among the outputs, for the loss to read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(x)), self.body.rise.weight


class SparseEmbedding(nn.Module):
    """The embedding's gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH, sparse=True, padding_idx=0)
        self.body = MLP()

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.body(self.embedding(tokens))
        return y


class FourierOperator(nn.Module):
    """Multiplies by complex weights between two Fourier transforms (Li et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(1, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rise(x).transpose(1, 2)
        modes = torch.fft.rfft(x)[..., :5]
        mixed = torch.fft.irfft(torch.einsum("bik,iok->bok", modes, self.weight), n=x.shape[-1])
        y: Tensor = self.fall(torch.nn.functional.gelu(mixed + x).transpose(1, 2))
        return y


class BFloat16(nn.Module):
    """All weights are in half precision; the norm works in single."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            normed = nn.functional.rms_norm(x.float(), (WIDTH,)).to(x.dtype)
            x = x + block(normed)
        return x


FEATURES = rows(4, WIDTH)

ARCHITECTURES = (
    describe("trap", SpectralNormHooks, FEATURES),
    describe("trap", Pruned, FEATURES),
    describe("trap", Orthogonal, FEATURES),
    describe("trap", FrozenStatistics, rows(4, 3, 8, 8)),
    describe("trap", CumulativeStatistics, FEATURES),
    describe("trap", AuxiliaryHead, FEATURES),
    describe("trap", RootHook, FEATURES),
    describe("trap", BackwardHook, FEATURES),
    describe("trap", ParameterHook, FEATURES),
    describe("trap", HyperNetwork, FEATURES),
    describe("trap", ScriptedPart, FEATURES),
    describe("trap", CustomOperator, FEATURES),
    describe("trap", StraightThroughCheckpointed, FEATURES),
    describe("trap", StraightThroughReentrant, FEATURES),
    describe("trap", PatchedForward, FEATURES),
    describe("trap", SharedBuffer, FEATURES),
    describe("trap", ReturnsParameter, FEATURES),
    describe("trap", SparseEmbedding, texts()),
    describe("trap", FourierOperator, rows(2, 12, 1)),
    describe("trap", BFloat16, texts()),
)
