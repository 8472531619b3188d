"""Traps of differentiation: own backwards, recomputation, regions without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .parts import MLP, WIDTH, describe, rows


class RoundStraightThrough(torch.autograd.Function):
    """Rounds, and lets gradients pass as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(torch.autograd.Function):
    """The identity, its gradient turned round (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class StraightThrough(nn.Module):
    """An autograd function whose backward is not the derivative of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(RoundStraightThrough.apply(self.before(x)))
        return y


class Quantizer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = RoundStraightThrough.apply(x)
        return y


class StraightThroughLayer(nn.Module):
    """The same inside a small module of its own, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.quantizers = nn.ModuleList(Quantizer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block, quantizer in zip(self.blocks, self.quantizers, strict=True):
            x = quantizer(block(x))
        return x


class GradientReversal(nn.Module):
    """A second head is trained against the features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, WIDTH), MLP())
        self.label, self.domain = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.features(x)
        return {"label": self.label(features), "domain": self.domain(Reverse.apply(features))}


class VectorQuantizer(nn.Module):
    """Straight-through by detach, a codebook and two more losses (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.codes = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        code = self.codes[torch.cdist(z, self.codes).argmin(-1)]
        commitment = (z - code.detach()).square().mean() + (z.detach() - code).square().mean()
        return self.decoder(z + (code - z).detach()), commitment


class Checkpointed(nn.Module):
    """Blocks recomputed in the backward pass, with dropout in them."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(MLP(), nn.Dropout(0.2)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        scores: Tensor = self.head(x)
        return scores


class CheckpointedReentrant(Checkpointed):
    """The same by the older, reentrant implementation."""

    reentrant = True


class WithoutGradient(nn.Module):
    """A target made under no_grad, and a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = MLP(), MLP()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.student(x)
        with torch.no_grad():
            target = self.teacher(x)
        loss = (features - target).square().mean()
        return {"loss": loss, "scores": self.head(features.detach())}


class AutocastRegion(nn.Module):
    """Half of it runs in bfloat16, whatever the caller does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = MLP(), nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.relu(self.inside(x))
        y: Tensor = self.after(x.float())
        return y


class GradientHook(nn.Module):
    """Halves a gradient by a hook on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        y: Tensor = self.after(x)
        return y


class GradientPenalty(nn.Module):
    """Differentiates itself in forward (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(at).sum(), at, create_graph=True)
        return self.critic(x), (slope.norm(dim=-1) - 1).square().mean()


FEATURES = rows(4, WIDTH)

ARCHITECTURES = (
    describe("trap", StraightThrough, FEATURES),
    describe("trap", StraightThroughLayer, FEATURES),
    describe("trap", GradientReversal, rows(4, 8)),
    describe("trap", VectorQuantizer, rows(6, 8)),
    describe("trap", Checkpointed, rows(4, 8)),
    describe("trap", CheckpointedReentrant, rows(4, 8)),
    describe("trap", WithoutGradient, FEATURES),
    describe("trap", AutocastRegion, FEATURES),
    describe("trap", GradientHook, FEATURES),
    describe("trap", GradientPenalty, rows(4, 8)),
)
