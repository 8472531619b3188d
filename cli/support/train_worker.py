"""Training process started by `launch_ranks`: one rank of the split model, or the unsplit model.

Rank 0 (or the single process) writes its result, and a failing rank its error, as JSON files in
the result folder.
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

from ...core.plan.plan import Plan
from ...profiler.machine.memory import keep_freed_memory
from ...profiler.models.families import build_loss, build_model, training_batch
from ...runtime.distributed import DistributedPipeline
from ...runtime.ranks.failure_detection import ConnectionEnded
from ...runtime.ranks.process_groups import end_process, init_process_group
from ...runtime.trace import record
from ...runtime.verify import join_samples
from .child_process import end_with_owner
from .launch_ranks import write_error
from .load_object import OwnModel

LEARNING_RATE = 1e-3

Step = tuple[float, float]
"""Mean loss of the batch, and its time in seconds for forward, backward and gradient sync."""


def main() -> int:
    """Train as the command line says and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--record", action="store_true")
    OwnModel.add_arguments(parser)
    given = parser.parse_args()
    own = OwnModel.read_arguments(given)
    end_with_owner(given.results)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory()
    rank = 0 if given.whole else int(os.environ["RANK"])
    try:
        plan = Plan.read(given.plan)
        if given.whole:
            training = train_whole(plan, own, given.steps, given.seed)
        else:
            recorded = given.results / "timeline.json" if given.record else None
            training = train_split(plan, own, given.steps, given.seed, given.timeout, recorded)
        steps = []
        for step in training:
            steps.append(step)
            # A sign of progress in the folder; the failure tests wait for it.
            (given.results / f"training.{rank}").touch()
    except Exception as error:  # noqa: BLE001 (the launcher raises it)
        write_error(given.results, rank, error)
        end_process(1)
    if rank == 0:
        losses, times_s = [step[0] for step in steps], [step[1] for step in steps]
        result = {"losses": losses, "step_times_s": times_s}
        (given.results / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def train_split(
    plan: Plan,
    own: OwnModel | None,
    num_steps: int,
    seed: int,
    timeout_s: float,
    recorded: Path | None,
) -> Iterator[Step]:
    """Train this rank's stages; yield each batch's loss and the slowest rank's time.

    With ``recorded``, an additional step is taken and rank 0 writes its timeline to that file.
    """
    init_process_group(backend="gloo", timeout_s=timeout_s)
    model, loss_fn = _seeded_model(plan, own, seed)
    pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn)
    _stop_on_sigterm(pipeline)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        samples, targets = _microbatches(plan, own, seed, step)
        args, kwargs = _as_call(join_samples(samples))
        target = join_samples(targets)
        pipeline.barrier()  # so that no rank's time includes waiting for another's start
        start = time.perf_counter()
        loss = pipeline.step(*args, target=target, **kwargs)
        elapsed_s = time.perf_counter() - start
        optimizer.step()
        # Gradients stay allocated, so that every step after the first does the same work.
        optimizer.zero_grad(set_to_none=False)
        yield pipeline.share_results(loss, elapsed_s)
    if recorded is not None:
        samples, targets = _microbatches(plan, own, seed, num_steps)
        args, kwargs = _as_call(join_samples(samples))
        with record(pipeline) as trace:
            pipeline.barrier()
            pipeline.step(*args, target=join_samples(targets), **kwargs)
        timeline = trace.timeline()
        if pipeline.rank == 0:
            timeline.write(recorded)
    pipeline.close()
    dist.destroy_process_group()


def train_whole(plan: Plan, own: OwnModel | None, num_steps: int, seed: int) -> Iterator[Step]:
    """Train the unsplit model on the same micro-batches."""
    model, loss_fn = _seeded_model(plan, own, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        samples, targets = _microbatches(plan, own, seed, step)
        start = time.perf_counter()
        total = 0.0
        for sample, wanted in zip(samples, targets, strict=True):
            args, kwargs = _as_call(sample)
            loss = loss_fn(model(*args, **kwargs), wanted) / plan.num_microbatches
            loss.backward()
            total += float(loss.detach())
        elapsed_s = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield total, elapsed_s


def _seeded_model(
    plan: Plan, own: OwnModel | None, seed: int
) -> tuple[nn.Module, Callable[[Any, Any], Tensor]]:
    torch.manual_seed(seed)
    if own is not None:
        return own.build(), own.load_loss()
    assert plan.spec is not None, "the launcher checks that"
    return build_model(plan.spec), build_loss(plan.spec)


def _microbatches(
    plan: Plan, own: OwnModel | None, seed: int, step: int
) -> tuple[list[Any], list[Any]]:
    """Return inputs and target of every micro-batch of one step, the same on every rank."""
    # A prime multiple keeps the steps of different seeds apart.
    drawn = seed * 1_000_003 + step
    if own is not None:
        torch.manual_seed(drawn)
        return own.make_microbatches(plan)
    assert plan.spec is not None, "the launcher checks that"
    count = plan.num_microbatches
    inputs, target = training_batch(plan.spec, plan.inputs, count, seed=drawn)
    columns = [tensor.chunk(count) for tensor in inputs.values()]
    return list(zip(*columns, strict=True)), list(target.chunk(count))


def _as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and keywords: a dict are keywords, a tuple several arguments."""
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def _stop_on_sigterm(pipeline: DistributedPipeline) -> None:
    """Let a rank that torchrun terminates report first which rank it lost."""

    def stop(*_: object) -> None:
        # While the pipeline finds the lost rank, a second error would hide its answer.
        if not pipeline.diagnosing:
            raise ConnectionEnded("terminated by the launcher because another rank ended")

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    sys.exit(main())
