"""The models of the conformance table: what pipelines stumble over, in small.

Each has eight units or more in the order it runs them, and says before which of them it may be
cut into two, four or eight stages. No gradient is zero by construction (no bias in front of a
normalisation), so that relative differences mean something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from conformance_suite.blocks import (
    Attention,
    Block,
    CrossBlock,
    Double,
    Experts,
    Residual,
    Step,
    TransformerBlock,
)

WIDTH = 16
VOCABULARY = 24
LENGTH = 6
ROWS = 4
"""Samples of one micro-batch."""

SEED = 0


@dataclass(frozen=True)
class Model:
    """One row of the table.

    Attributes:
        name: As the table calls it.
        what: What is hard about it, in words.
        build: The model, the same every time.
        batch: Inputs by position and the target of that many samples.
        loss: Mean over the samples of what the model returned.
        cuts: Seven modules; eight stages begin at the model's start and at these.
        aux_losses: Patterns and weights of attributes that hold further losses.
    """

    name: str
    what: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    cuts: tuple[str, ...]
    aux_losses: tuple[tuple[str, float], ...] = ()

    def cuts_into(self, num_stages: int) -> tuple[str, ...]:
        """Return the modules that the second and later of so many stages begin with."""
        every = (len(self.cuts) + 1) // num_stages
        return self.cuts[every - 1 :: every]

    def fresh(self) -> nn.Module:
        """Return the model in double precision and training mode."""
        torch.manual_seed(SEED)
        return self.build().double().train()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Step(WIDTH) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(6)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))
        return y


class UNet(nn.Module):
    """Each way up reads what the way down of its size left."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, 4), Double(4, 8), Double(8, 8), Double(8, 8)])
        self.up = nn.ModuleList([Double(16, 8), Double(16, 8), Double(12, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for step in self.down:
            x = step(functional.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for step in self.up:
            x = step(torch.cat([functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        y: Tensor = self.head(x)
        return y


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([TransformerBlock(WIDTH, causal=True) for _ in range(7)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


class EncoderDecoder(nn.Module):
    """T5's wiring: one embedding for both sides and the head, a position bias shared by blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.distances = nn.Embedding(2 * LENGTH - 1, Attention.HEADS)
        self.encoder = nn.ModuleList([TransformerBlock(WIDTH) for _ in range(4)])
        self.decoder = nn.ModuleList([CrossBlock(WIDTH) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight
        steps = torch.arange(LENGTH)
        self.register_buffer("apart", steps[:, None] - steps[None] + LENGTH - 1, persistent=False)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        bias = self.distances(self.apart).permute(2, 0, 1)[None]
        memory = self.shared(ids)
        for block in self.encoder:
            memory = block(memory, bias)
        x = self.shared(decoder_ids)
        for block in self.decoder:
            x = block(x, memory)
        y: Tensor = self.head(self.norm(x))
        return y


class TwoTower(nn.Module):
    """The second tower's input waits until the first tower is done, and its result after that."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.right = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.joint = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), Block(WIDTH)])

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = torch.cat([self.left(left), self.right(right)], -1)
        y: Tensor = self.joint[1](self.joint[0](both))
        return y


class FanOut(nn.Module):
    """What the first block makes is read by every later one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x) + first
        return x


class LateInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks[:6]:
            x = block(x)
        y: Tensor = self.blocks[7](self.blocks[6](x) * scale)
        return y


class IntBoundary(nn.Module):
    """Which expert each sample goes to is found out early and used late."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(7)])
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.Embedding(5, WIDTH)
        self.last = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scores = self.router(x)
        expert = scores.argmax(-1)
        x = x + scores.amax(-1, keepdim=True)
        for block in self.blocks[1:]:
            x = block(x)
        y: Tensor = self.last(x + self.experts(expert))
        return y


class Dropout(nn.Module):
    """Every dropout has a width of its own, by which its masks are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH + n, WIDTH + n + 1), nn.Tanh(), nn.Dropout(0.3))
            for n in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class FrozenStage(nn.Module):
    """A frozen backbone in front of what is trained, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Block(WIDTH) for _ in range(4))).requires_grad_(False)
        self.trained = nn.Sequential(*(Block(WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trained(self.backbone(x))
        return y


class UnusedParameter(nn.Module):
    """A parameter of a block in use and a whole module that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])
        self.blocks[3].register_parameter("spare", nn.Parameter(torch.ones(3)))
        self.retired = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MultipleOutputs(nn.Module):
    """An auxiliary classifier half way, as GoogLeNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])
        self.auxiliary = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks[:3]:
            x = block(x)
        early = self.auxiliary(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x, early


class ReadsByReference(nn.Module):
    """A head that reads the weight of an embedding it only refers to, and has to run as written."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.reference = [tokens]  # a list hides the embedding from nn.Module

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if float(x.detach().abs().amax()) > 1e6:  # a look at the data, which no tracer follows
            x = x / 2
        return functional.linear(x, self.reference[0].weight)


class UnregisteredTie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([TransformerBlock(WIDTH, causal=True) for _ in range(7)])
        self.head = ReadsByReference(self.tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Counting(nn.Module):
    """A block whose scale depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = x + self.block(x) / self.calls
        return y


class StatefulOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Counting() if n in (1, 5) else Block(WIDTH) for n in range(8)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DictInputs(nn.Module):
    """One argument, which is a dict of a tensor, a list with another, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x: Tensor = batch["x"]
        for block in self.blocks[:6]:
            x = block(x)
        (scale,) = batch["late"]
        assert batch["mask"] is None
        y: Tensor = self.blocks[7](self.blocks[6](x) * scale * batch["factor"])
        return y


class GradientCheckpointing(nn.Module):
    """Every block but the first checkpointed, some reentrantly, as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number, block in enumerate(self.blocks[1:]):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)
        return x


class AttributeLosses(nn.Module):
    """A mixture of experts in every block, each with a balance loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows(width: int = WIDTH, *, target: int = WIDTH) -> Callable[[int], Any]:
    """Random vectors, and others to reach."""
    return lambda count: (
        (torch.randn(count, width, dtype=torch.float64),),
        torch.randn(count, target, dtype=torch.float64),
    )


def images(*target: int) -> Callable[[int], Any]:
    return lambda count: (
        (torch.randn(count, 3, 8, 8, dtype=torch.float64),),
        torch.randn(count, *target, dtype=torch.float64),
    )


def two_inputs(second: int) -> Callable[[int], Any]:
    return lambda count: (
        (
            torch.randn(count, WIDTH, dtype=torch.float64),
            torch.randn(count, second, dtype=torch.float64),
        ),
        torch.randn(count, WIDTH, dtype=torch.float64),
    )


def one_dict(count: int) -> tuple[tuple[Any, ...], Tensor]:
    (x, late), target = two_inputs(1)(count)
    return ({"x": x, "late": [late], "mask": None, "factor": 0.5},), target


def texts(inputs: int) -> Callable[[int], Any]:
    def make(count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        drawn = [torch.randint(0, VOCABULARY, (count, LENGTH)) for _ in range(inputs + 1)]
        return tuple(drawn[:-1]), drawn[-1]

    return make


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def both_squares(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    last, early = outputs
    return squares(last, target) + 0.3 * squares(early, target)


def next_token(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def numbered(stem: str, count: int, *, first: int = 1) -> tuple[str, ...]:
    return tuple(f"{stem}.{index}" for index in range(first, first + count))


MODELS = (
    Model("MLP", "stages end in ReLU", MLP, rows(), squares, numbered("blocks", 7)),
    Model(
        "CNN", "BatchNorm's buffers, residuals", CNN, images(10), squares,
        (*numbered("blocks", 6, first=0), "head"),
    ),
    Model(
        "U-Net", "long skips", UNet, images(2, 8, 8), squares,
        (*numbered("down", 3), *numbered("up", 3, first=0), "head"),
    ),
    Model(
        "GPT tied", "first and last stage share a weight", TiedGPT, texts(1), next_token,
        numbered("blocks", 7, first=0),
    ),
    Model(
        "T5-like", "encoder and decoder share a weight, all read its output", EncoderDecoder,
        texts(2), next_token, (*numbered("encoder", 3), *numbered("decoder", 4, first=0)),
    ),
    Model(
        "two-tower", "one input waits for the other's tower", TwoTower, two_inputs(WIDTH), squares,
        ("left.1", "left.2", *numbered("right", 3, first=0), "joint.0", "joint.1"),
    ),
    Model("fan-out", "one tensor, read by every stage", FanOut, rows(), squares,
          numbered("blocks", 7)),
    Model("late input", "an input the last stage reads", LateInput, two_inputs(1), squares,
          numbered("blocks", 7)),
    Model("int boundary", "integers cross the cuts", IntBoundary, rows(), squares,
          (*numbered("blocks", 6), "last")),
    Model("dropout", "random masks", Dropout, rows(target=WIDTH + 8), squares,
          numbered("blocks", 7)),
    Model("frozen stage", "the first half is not trained", FrozenStage, rows(), squares,
          (*numbered("backbone", 3), *numbered("trained", 4, first=0))),
    Model("unused parameter", "parameters no stage reads", UnusedParameter, rows(), squares,
          numbered("blocks", 7)),
    Model("multiple outputs", "an output of a middle stage", MultipleOutputs, rows(),
          both_squares, numbered("blocks", 7)),
    Model("unregistered tie", "a layer called as written reads an embedding's weight",
          UnregisteredTie, texts(1), next_token, numbered("blocks", 7, first=0)),
    Model("stateful opaque layer", "layers called as written count their calls", StatefulOpaque,
          rows(), squares, numbered("blocks", 7)),
    Model("dict inputs", "one argument, a nest of tensors, None and a number", DictInputs, one_dict,
          squares, numbered("blocks", 7)),
    Model("gradient checkpointing", "activation checkpoints in the model itself",
          GradientCheckpointing, rows(), squares, numbered("blocks", 7)),
    Model("attribute losses", "every stage has losses of its own", AttributeLosses, rows(),
          squares, numbered("blocks", 7), (("*.balance", 0.1),)),
)  # fmt: skip
