"""Our executor against torch's own Schedule1F1B: the same model, stages, ranks and transport."""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_check.program import Failed, Given, Result, run_program
from benchmarks.gpu_check.ranks import WORDS, Seat, run_ranks, way_found
from benchmarks.gpu_check.subject import Subject, make_subject
from benchmarks.torch_schedule import TorchPipeline
from stagewright.runtime.distributed import DistributedPipeline

PAIRS, SMALL_PAIRS, WARM_UP = 20, 5, 2
LIMIT_S = 130.0
CLOSE = 1e-3
"""Largest relative difference of both engines' gradients."""


def torch_throughput(given: Given) -> Result:
    """Time steps of both engines in turn; what counts is the ratio within a pair."""
    way = way_found(given.folder, given.device)
    if way == "emulated":  # torch's engine sends in batches of messages, which it does not know
        way = "gloo"
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(time_steps, way, 2, Path(folder) / "ranks", LIMIT_S, small=given.small)
    pairs = ranks[0]["pairs"]
    result: Result = {
        "way": way,
        "words": WORDS[way],
        "device": ranks[0]["device"],
        "torch_s": statistics.median(theirs for theirs, _ in pairs),
        "ours_s": statistics.median(ours for _, ours in pairs),
        "throughput_ratio": statistics.median(theirs / ours for theirs, ours in pairs),
        "gradients": max(found["gradients"] for found in ranks),
        "pairs": pairs,
    }
    if result["gradients"] > CLOSE:
        raise Failed("both engines compute different gradients", result)
    return result


def time_steps(seat: Seat) -> dict[str, Any]:
    """Take steps as a rank by one engine and then by the other, again and again."""
    subject = make_subject(seat.device, seat.num_ranks, small=seat.small)
    plan, loss = subject.plan, Subject.loss
    ours = DistributedPipeline(subject.model, plan, loss_fn=loss)
    theirs = TorchPipeline(copy.deepcopy(subject.model), plan, loss, seat.rank, seat.device)
    pairs = []
    for _ in range(WARM_UP + (SMALL_PAIRS if seat.small else PAIRS)):
        # torch's schedule sums a tied weight's gradient anew in every step.
        ours.module.zero_grad()
        theirs.module.zero_grad()
        pairs.append((_time_of(theirs, subject), _time_of(ours, subject)))
    found = {
        "device": str(ours.device),
        "pairs": pairs[WARM_UP:],
        "gradients": _difference(ours, theirs),
    }
    ours.barrier()
    ours.close()
    return found


def _time_of(engine: DistributedPipeline | TorchPipeline, subject: Subject) -> float:
    dist.barrier()
    start = time.perf_counter()
    engine.step(subject.tokens, target=subject.tokens)
    if subject.tokens.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def _difference(ours: DistributedPipeline, theirs: TorchPipeline) -> float:
    """Return the relative difference of all gradients' norms: both engines took as many steps."""
    norms = [
        sum(float(p.grad.norm()) ** 2 for p in module.parameters() if p.grad is not None) ** 0.5
        for module in (ours.module, theirs.module)
    ]
    return abs(norms[0] - norms[1]) / norms[1] if norms[1] else float("inf")


if __name__ == "__main__":
    sys.exit(run_program(torch_throughput))
