"""One process of a demo training run: a rank of the split model, or the whole model alone.

Started by `cli.launch`, never by hand. Rank 0 (or the single process) writes its result, and a
rank that fails writes its error, as JSON files in the result folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...profiler.machine.allocator import keep_freed_memory
from ...profiler.models.families import build_loss, build_model, training_batch
from ...runtime.distributed import DistributedPipeline
from ...runtime.ranks.failure_detection import ConnectionEnded
from ...runtime.ranks.process_groups import end_process, init_process_group
from ...runtime.trace import record
from .child_process import end_with_owner
from .rank_error import Account

LEARNING_RATE = 1e-3

Step = tuple[float, float]
"""Mean loss of the batch, and seconds of forward, backward and gradient synchronisation."""


def main() -> int:
    """Exit code 0 when every step ran."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    end_with_owner(given.results)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory()
    rank = 0 if given.whole else int(os.environ["RANK"])
    try:
        plan = Plan.read(given.plan)
        steps = []
        for step in (
            train_whole(plan, given.steps, given.seed)
            if given.whole
            else train_split(
                plan,
                given.steps,
                given.seed,
                given.timeout,
                given.results / "timeline.json" if given.record else None,
            )
        ):
            steps.append(step)
            (given.results / f"training.{rank}").touch()
    except Exception as error:  # noqa: BLE001 (the launcher raises it)
        account = Account.of(rank, error)
        (given.results / f"error.{rank}.json").write_text(
            account.model_dump_json(), encoding="utf-8"
        )
        sys.stderr.write(f"rank {rank}: {account.trace or account.message}\n")
        end_process(1)
    if rank == 0:
        losses, times_s = [step[0] for step in steps], [step[1] for step in steps]
        result = {"losses": losses, "step_times_s": times_s}
        (given.results / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def train_split(
    plan: Plan, num_steps: int, seed: int, timeout_s: float, recorded: Path | None
) -> Iterator[Step]:
    """Train this rank's stages; every rank yields the batch's loss and the slowest rank's time.

    With ``recorded`` one more step is taken, and rank 0 writes its timeline there.
    """
    init_process_group(backend="gloo", timeout_s=timeout_s)
    model, loss_fn = _seeded_model(plan, seed)
    pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn)
    _stop_when_told(pipeline)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        inputs, target = _batch(plan, seed, step)
        pipeline.barrier()
        start = time.perf_counter()
        loss = pipeline.step(*inputs, target=target)
        elapsed_s = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield pipeline.share_results(loss, elapsed_s)
    if recorded is not None:
        inputs, target = _batch(plan, seed, num_steps)
        with record(pipeline) as trace:
            pipeline.barrier()
            pipeline.step(*inputs, target=target)
        timeline = trace.timeline()
        if pipeline.rank == 0:
            timeline.write(recorded)
    pipeline.close()
    dist.destroy_process_group()


def train_whole(plan: Plan, num_steps: int, seed: int) -> Iterator[Step]:
    """Train the unsplit model on the same micro-batches."""
    model, loss_fn = _seeded_model(plan, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        inputs, target = _batch(plan, seed, step)
        start = time.perf_counter()
        total = 0.0
        columns = [tensor.chunk(plan.num_microbatches) for tensor in (*inputs, target)]
        for *flat, wanted in zip(*columns, strict=True):
            loss = loss_fn(model(*flat), wanted) / plan.num_microbatches
            loss.backward()
            total += float(loss.detach())
        elapsed_s = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield total, elapsed_s


def _seeded_model(plan: Plan, seed: int) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
    if plan.spec is None:
        raise InvalidInput("this plan names no model family; see examples/train.py")
    torch.manual_seed(seed)
    return build_model(plan.spec), build_loss(plan.spec)


def _batch(plan: Plan, seed: int, step: int) -> tuple[list[Tensor], Tensor]:
    """Inputs by position and the target of one step."""
    assert plan.spec is not None
    inputs, target = training_batch(
        plan.spec, plan.inputs, plan.num_microbatches, seed=seed * 1_000_003 + step
    )
    return list(inputs.values()), target


def _stop_when_told(pipeline: DistributedPipeline) -> None:
    """When one rank ends, the launcher stops the others; let them first say who that was."""

    def told(*_: object) -> None:
        if not pipeline.diagnosing:
            raise ConnectionEnded("told to stop, because another rank ended")

    signal.signal(signal.SIGTERM, told)


if __name__ == "__main__":
    sys.exit(main())
