"""A rank is killed in the midst of training; the others end and name it."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_check.program import Failed, Given, Result, run_program
from benchmarks.gpu_check.ranks import WORDS, Ranks, Seat, way_found
from benchmarks.gpu_check.subject import Subject, make_subject
from stagewright.runtime.distributed import DistributedPipeline

START_LIMIT_S, END_LIMIT_S = 90.0, 45.0
VICTIM = 1


def killed_rank(given: Given) -> Result:
    """Kill one rank once all of them train, and see how the others end."""
    way = way_found(given.folder, given.device)
    num_ranks = min(3, torch.cuda.device_count()) if way == "nccl" else 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(train, way, num_ranks, folder, small=given.small) as ranks:
            _await_steps(ranks, folder, num_ranks)
            start = time.monotonic()
            ranks.kill(VICTIM)
            codes = ranks.wait(END_LIMIT_S)
            ended_s = time.monotonic() - start
            said = {str(rank): ranks.account(rank) for rank in range(num_ranks) if rank != VICTIM}
    result: Result = {
        "way": way, "words": WORDS[way], "ranks": num_ranks, "victim": VICTIM,
        "ended_s": round(ended_s, 2), "codes": codes, "said": said,
    }  # fmt: skip
    for rank, account in said.items():
        if codes[int(rank)] is None:
            raise Failed(f"rank {rank} still runs {END_LIMIT_S:g} s after the kill", result)
        words = account.get("error", "nothing")
        if account.get("kind") != "RankFailed" or f"rank {VICTIM} (" not in words:
            raise Failed(f"rank {rank} said: {words.splitlines()[0]}", result)
    return result


def train(seat: Seat) -> None:
    """Take step after step as a rank, until another is gone."""
    subject = make_subject(seat.device, seat.num_ranks, small=seat.small)
    pipeline = DistributedPipeline(subject.model, subject.plan, loss_fn=Subject.loss)
    while True:
        pipeline.step(subject.tokens, target=subject.tokens)
        pipeline.module.zero_grad()
        (seat.folder / f"trains.{seat.rank}").touch()


def _await_steps(ranks: Ranks, folder: Path, num_ranks: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while len(list(folder.glob("trains.*"))) < num_ranks:
        for rank in range(num_ranks):
            if account := ranks.account(rank):
                raise RuntimeError(f"rank {rank} ended before the kill: {account.get('error')}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks do not train after {START_LIMIT_S:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(run_program(killed_rank))
