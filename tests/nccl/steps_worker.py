"""Ranks that print, for each variant, what made their hosts wait in each of a few steps.

A variant's ``does`` is ``evaluate``, ``clip`` or ``share`` (as the command line's training) for
more than a step; without it, each is a step.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.nccl.host_tensor import on_host
from tests.nccl.launch_log import LOG
from tests.nccl.launches import Connect, DeviceSynchronise, Entry, HostRead, Launch, StreamWait
from tests.runtime.aux_losses_worker import Experts
from tests.runtime.equality_worker import plan_of
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import SPECS, Case, make_batch, make_case, traced_profile

STEPS = 3

MAKERS = (
    torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.tensor, torch.as_tensor,
    torch.rand, torch.randn, torch.scalar_tensor, torch.linspace, torch.eye, torch.from_numpy,
)  # fmt: skip


class HostMade(TorchFunctionMode):
    """Lists tensors that are made in a host's memory, and lists of numbers used as indices.

    On a device either is copied there, and the host waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if function in MAKERS and options.get("device") is None:
            self.found.append(function.__name__)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found += ["a list as an index" for part in index if isinstance(part, list)]
        return function(*args, **options)


class PartlyUsed(nn.Linear):
    """A layer one of whose weights gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.unused.detach().sum()


class Cast(nn.Module):
    """Hands its input on as another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


class Turned(nn.Module):
    """Turns complex numbers by a quarter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1j


class Part(nn.Module):
    """Hands on the imaginary part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.imag


def layers_of(name: str) -> list[nn.Module]:
    """Return layers with what the models of the field do not have."""
    if name == "experts":
        return [Experts() for _ in range(4)]
    if name == "partly used":
        return [PartlyUsed(6) for _ in range(4)]
    if name == "complex":
        return [nn.Linear(6, 6), Cast(torch.complex64), Turned(), Part(), nn.Linear(6, 6)]
    if name == "whole numbers":
        return [Cast(torch.int16), Cast(torch.float32), nn.Linear(6, 6), nn.Linear(6, 6)]
    casts = (Cast(torch.float8_e5m2), Cast(torch.float32))
    return [nn.Linear(6, 6), casts[0], casts[1], nn.Linear(6, 6), casts[0], casts[1]]


def make_model(name: str) -> Case:
    """Return a model of the field, or one of `layers_of`."""
    if name in SPECS:
        return make_case(name)
    torch.manual_seed(0)
    model, like = nn.Sequential(*layers_of(name)), make_case("mlp")
    return Case(name, like.spec, model, (torch.randn(4, 6),), nn.functional.mse_loss)


def main() -> None:
    """Print a line of JSON for each rank and variant."""
    torch.set_num_threads(1)
    count, variants = int(sys.argv[1]), json.loads(sys.argv[2])
    cases = {}
    for name in dict.fromkeys(variant["model"] for variant in variants):
        case = make_model(name)
        cases[name] = (case, traced_profile(case))
    run_forked(count, functools.partial(take_steps, variants, cases))


def take_steps(variants: list[dict[str, Any]], cases: dict[str, tuple[Case, Profile]]) -> None:
    init_process_group(backend="gloo", timeout_s=60)
    for index, variant in enumerate(variants):
        case, profile = cases[variant["model"]]
        plan = plan_of(variant, profile, torch.float32)
        keys = ("batch_statistics", "strategy", "aux_losses", "check_finite")
        options = {key: variant[key] for key in keys if key in variant}
        if "autocast" in variant:
            options["autocast"] = getattr(torch, variant["autocast"])
        options["loss_reduction"] = "microbatch"  # the look at the loss reads once more, at first
        pipeline = DistributedPipeline(
            copy.deepcopy(case.model), plan, loss_fn=case.loss_fn, **options
        )
        act = functools.partial(do, pipeline, variant, *make_host_batch(case, plan))
        waits, summed, start = [], [], len(LOG.entries)
        for _ in range(STEPS):
            began = len(LOG.entries)
            act()
            done = LOG.entries[began:]
            waits.append([words for entry in done if (words := wait_in(entry))])
            summed.append([words for entry in done if (words := collective_in(entry))])
        with HostMade() as host_made:  # apart: under the mode each read is logged twice
            act()
        connected = sum(isinstance(entry, Connect) for entry in LOG.entries[start:])
        print_line(
            {
                "variant": index, "rank": pipeline.rank, "waits": waits, "collectives": summed,
                "connected": connected, "unread": count_unread(LOG.entries),
                "weights": sizes_of(pipeline.module), "host_made": host_made.found,
            }
        )  # fmt: skip
        pipeline.close()


def make_host_batch(case: Case, plan: Plan) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return inputs and target in a host's memory."""
    if case.name in SPECS:
        batch, target = make_batch(case, plan)
        values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    else:
        rows = plan.num_microbatches * len(case.sample[0])
        values, target = [torch.randn(rows, 6)], torch.randn(rows, 6)
    return on_host(values), on_host(target)


def do(
    pipeline: DistributedPipeline,
    variant: dict[str, Any],
    values: list[torch.Tensor],
    target: torch.Tensor,
) -> None:
    """Do once what the variant is about."""
    if variant.get("does") == "evaluate":
        pipeline.evaluate(*values, target=target)
        return
    loss = pipeline.step(*values, target=target, loss_scale=variant.get("loss_scale", 1.0))
    if variant.get("does") == "clip":
        pipeline.clip_grad_norm_(1e-3)
    if variant.get("does") == "share":
        pipeline.share_results(loss, 0.5)


def wait_in(entry: Entry) -> str | None:
    """What the host waits for, if it does."""
    return entry.what if isinstance(entry, HostRead | DeviceSynchronise) else None


def collective_in(entry: Entry) -> str | None:
    """Return the words of a collective that several ranks launch together."""
    return entry.what if isinstance(entry, Launch) and entry.sender is None else None


def count_unread(entries: Sequence[Entry]) -> int:
    """Return how many of the stream's waits no wait of the host covers."""
    seen = covered = 0
    for entry in entries:
        seen += isinstance(entry, StreamWait)
        if isinstance(entry, HostRead):
            covered = max(covered, seen if entry.waits is None else entry.waits)
    return seen - covered


def sizes_of(module: torch.nn.Module) -> dict[str, int]:
    """Return the number of elements of every weight."""
    return {name: weight.numel() for name, weight in module.named_parameters()}


if __name__ == "__main__":
    main()
