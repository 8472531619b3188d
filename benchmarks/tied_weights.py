"""Losses of a model with tied weights, step by step: unsplit, ours, and torch's own pipeline.

A small GPT, whose first and last stage share the token embedding, learns to count on two ranks, by
`1f1b` and eight micro-batches, in double precision. torch's `pipeline()` gives each stage a copy of
the shared weight and adds up no gradients, so the copies part with the first step. Exits 1 when a
loss of ours differs from the unsplit model's by more than 1e-9.

    python benchmarks/tied_weights.py --write docs/evidence/conformance.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from conformance_suite.cell import NUM_MICROBATCHES, Cell
from conformance_suite.models import LENGTH, ROWS, VOCABULARY
from conformance_suite.ours import plan_for
from conformance_suite.reference import BY_NAME
from tables import markdown_table, write_between_marks
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.distributed import DistributedPipeline

RANKS = 2
STEPS = 50
SHOWN = (1, 2, 5, 10, 20, 50)
CELL = Cell("GPT tied", "1f1b", RANKS)
MODEL = BY_NAME[CELL.model]

Step = Callable[[Tensor, Tensor], float | None]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return sequences that count from random numbers, and the number after each."""
    first = torch.randint(
        VOCABULARY, (ROWS * NUM_MICROBATCHES, 1), generator=torch.Generator().manual_seed(step)
    )
    numbers = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return numbers[:, :-1], numbers[:, 1:]


def train(module: nn.Module, step: Step) -> list[float]:
    """Return the loss of each step, where this rank has it."""
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for number in range(STEPS):
        loss = step(*batch(number))
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            losses.append(loss)
    return losses


def train_unsplit() -> list[float]:
    """Train the unsplit model on the same micro-batches."""
    module = MODEL.fresh()

    def step(ids: Tensor, target: Tensor) -> float:
        pieces = zip(ids.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
        total = 0.0
        for piece, wanted in pieces:
            loss = MODEL.loss(module(piece), wanted) / NUM_MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        return total

    return train(module, step)


def train_ours() -> list[float]:
    """Train one stage of our pipeline on each rank."""
    pipe = DistributedPipeline(MODEL.fresh(), plan_for(CELL), loss_fn=MODEL.loss)

    def step(ids: Tensor, target: Tensor) -> float | None:
        loss = pipe.step(ids, target=target)
        return None if loss is None else float(loss)

    losses = train(pipe.module, step)
    pipe.close()
    return losses


def train_torch(rank: int) -> list[float]:
    """Train one stage of torch's pipeline on each rank, as its documentation says."""
    sample, _ = MODEL.batch(ROWS)
    cuts = dict.fromkeys(MODEL.cuts_into(RANKS), SplitPoint.BEGINNING)
    stage = pipeline(MODEL.fresh(), sample, split_spec=cuts).build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=MODEL.loss)
    last = rank == RANKS - 1

    def step(ids: Tensor, target: Tensor) -> float | None:
        losses: list[Tensor] = []
        inputs = () if rank else (ids,)
        schedule.step(*inputs, target=target if last else None, losses=losses if last else None)
        return float(torch.stack(losses).detach().mean()) if last else None

    return train(stage.submod, step)


def run(rank: int, port: int, path: str) -> None:
    """One rank of both pipelines; the last one writes the losses."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {"ours": train_ours(), "torch": train_torch(rank)}
    if rank == RANKS - 1:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def table(losses: dict[str, list[float]]) -> str:
    """Return the shown steps as Markdown."""
    rows = [
        (step, *(f"{losses[side][step - 1]:.10f}" for side in ("unsplit", "ours", "torch")))
        for step in SHOWN
    ]
    return markdown_table(("step", "unsplit", "ours", "torch's pipeline()"), rows, left=0)


def main() -> int:
    """Train three times, compare, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print every loss as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "losses.json")
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            run, args=(free_port(), path), nprocs=RANKS
        )
        losses = json.loads(Path(path).read_text(encoding="utf-8"))
    losses["unsplit"] = train_unsplit()
    print(json.dumps(losses) if arguments.json else table(losses))
    if arguments.write:
        write_between_marks(arguments.write, "tied_weights.py", table(losses))
    pairs = zip(losses["ours"], losses["unsplit"], strict=True)
    return int(any(abs(ours - whole) > 1e-9 for ours, whole in pairs))


if __name__ == "__main__":
    sys.exit(main())
