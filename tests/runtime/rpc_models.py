"""Modules for RPC tests: importable by every worker, as a user's have to be."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

WAIT_S = 30.0


class Tied(nn.Module):
    """Two layers that follow each other share a weight; behind them, batch statistics.

    Args:
        far: Whether the embedding is the head as well, at the other end.
    """

    def __init__(self, *, far: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.norm, self.second = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.also = nn.Linear(8, 8, bias=False)
        self.also.weight = self.first.weight
        if far:
            self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.also(self.first(self.embedding(tokens))))
        return self.head(self.second(self.frozen(hidden).relu()))


class Meets(nn.Module):
    """Passes its input on; leaves a mark for each call, and may wait for another's mark.

    Args:
        folder: Where marks are.
        leaves: Its own marks are called so, with the number of the call.
        before: By number of the call, a mark that has to be there before it goes on.
    """

    def __init__(self, folder: Path, leaves: str, before: dict[int, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.folder, self.leaves, self.before, self.calls = folder, leaves, before, 0

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.any()):  # not while the worker captures it with zeros
            number, self.calls = self.calls, self.calls + 1
            (self.folder / f"{self.leaves}{number}").touch()
            self.wait_for(self.before.get(number))
        return x * self.weight

    def wait_for(self, mark: str | None) -> None:
        deadline = time.monotonic() + WAIT_S
        while mark is not None and not (self.folder / mark).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{mark} never came")
            time.sleep(0.01)


class Raises(nn.Module):
    """Fails for a negative input, and in the backward of a large one."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) < 0:
            raise ArithmeticError("negative input")
        if float(x.detach().sum()) > 100:
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("large input")


class Dies(nn.Module):
    """Ends its process in the forward of a negative input."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) < 0:
            os._exit(9)
        return x


class DiesLater(nn.Module):
    """Ends its process in the backward of a negative input."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) < 0:
            x.register_hook(lambda _: os._exit(9))
        return x * 1


def tied_model() -> Tied:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return Tied().double()


def far_tied_model() -> Tied:
    """Tied over all stages."""
    return Tied(far=True)


def build_unevenly() -> nn.Module:
    """As code of another version would on one of the workers."""
    is_other = rpc.get_worker_info().name == "worker2"
    return nn.Sequential(nn.Linear(4, 4), nn.GELU() if is_other else nn.ReLU(), nn.Linear(4, 4))
