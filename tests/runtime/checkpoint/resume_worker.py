"""A run that is saved under one plan and goes on under the next, each rank a forked child.

Ranks launch as on NCCL, and write what they launched for each leg.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.distributed import DistributedPipeline
from tests.nccl.process_group import manners, write_log
from tests.runtime.forked import MANNERS
from tests.torch_models import SPECS, Case, traced_profile

STEPS = 2
"""Of every leg."""

MICROBATCHES = 4

LEGS: tuple[tuple[int, str, tuple[int, ...]], ...] = (
    (4, "1f1b", (1, 1, 1, 1)),
    (2, "gpipe", (1, 1)),
    (1, "unsplit", ()),
    (3, "1f1b", (2, 1)),
    (2, "interleaved_1f1b", (1, 1, 1, 1)),
)
"""Ranks, schedule and replicas of each stage; each goes on from where the one before it saved."""


class Tied(nn.Module):
    """A language model in small: a tied embedding, layer and batch normalisation, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
              for _ in range(3))
        )  # fmt: skip
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1][1].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def make_batch(number: int, count: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, other ones in every step."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 16, (2 * count, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@cache
def profile_of_tied() -> Profile:
    sample, _ = make_batch(0, count=1)
    return traced_profile(Case("tied", SPECS["mlp"], Tied().double(), sample, loss_fn))


def make_plan(schedule: str, replicas: tuple[int, ...]) -> Plan:
    profile = profile_of_tied()
    base, extra = divmod(len(profile.layers), len(replicas))
    return plan_from_balance(
        profile,
        Cluster.uniform(dist.get_world_size()),
        PlanOptions.model_validate({"num_microbatches": MICROBATCHES, "schedule": schedule}),
        [base + (index < extra) for index in range(len(replicas))],
        replicas=replicas if max(replicas) > 1 else (),
    )


class Run:
    """The model in training, split as a leg says or whole, with its optimizer and scheduler."""

    def __init__(self, optimizer: str, schedule: str, replicas: tuple[int, ...], seed: int) -> None:
        torch.manual_seed(seed)  # other numbers in every leg: all must be loaded
        model = Tied().double()
        self.model: DistributedPipeline | nn.Module = model
        if replicas:
            plan = make_plan(schedule, replicas)
            self.model = DistributedPipeline(model, plan, loss_fn=loss_fn)
        module = self.model.module if isinstance(self.model, DistributedPipeline) else model
        self.optimizer = make_optimizer(optimizer, module)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def steps(self, first: int, count: int) -> list[float | None]:
        return [self.step(number) for number in range(first, first + count)]

    def step(self, number: int) -> float | None:
        batch, target = make_batch(number)
        loss = (
            self.model.step(batch, target=target)
            if isinstance(self.model, DistributedPipeline)
            else unsplit_step(self.model, batch, target)
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return None if loss is None else float(loss)


def unsplit_step(model: nn.Module, batch: Tensor, target: Tensor) -> Tensor:
    losses = []
    pieces = zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    for piece, wanted in pieces:
        loss = loss_fn(model(piece), wanted) / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def make_optimizer(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """In two groups, without the frozen parameter; a stage may have parameters of one kind only."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def run_leg(name: str, position: int, folder: Path, rank: int) -> dict[str, object]:
    """Load, train, save; the first leg goes on to the end, for comparison."""
    ranks, schedule, replicas = LEGS[position]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}-{position}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    run = Run(name, schedule, replicas, seed=position)
    first = position * STEPS
    if position:
        loaded = load_checkpoint(folder / name, run.model, run.optimizer)
        assert loaded.step == first
        assert getattr(run.model, "steps", first) == first
        run.scheduler.load_state_dict(loaded.extra["scheduler"])
    losses = run.steps(first, STEPS)
    save_checkpoint(
        folder / name,
        run.model,
        run.optimizer,
        step=first + STEPS,
        extra={"scheduler": run.scheduler.state_dict()},
    )
    following = run.steps(STEPS, (len(LEGS) - 1) * STEPS) if position == 0 else []
    if isinstance(run.model, DistributedPipeline):
        run.model.barrier()
        run.model.close()
    dist.destroy_process_group()
    return {"optimizer": name, "leg": position, "losses": losses, "following": following}


def run_legs(folder: Path, rank: int, names: list[str]) -> None:
    with open(folder / f"{rank}.jsonl", "w", encoding="utf-8") as file, manners():
        for name in names:
            for position, (ranks, _, _) in enumerate(LEGS):
                if rank < ranks:
                    file.write(json.dumps(run_leg(name, position, folder, rank)) + "\n")
                    file.flush()
                    write_log(Path(os.environ[MANNERS]), f"{name}-{position}", rank)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    profile_of_tied()  # before forking, as importing torch: once for all ranks
    children = []
    for rank in range(max(ranks for ranks, _, _ in LEGS)):
        child = os.fork()
        if child == 0:
            run_legs(folder, rank, names)
            return
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    sys.exit(f"{len(failed)} of {len(children)} ranks failed" if failed else 0)


if __name__ == "__main__":
    main()
