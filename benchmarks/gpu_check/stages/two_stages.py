"""Two stages against the unsplit model: in one process, and in two by every way there is."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_check.program import Failed, Given, Result, run_program
from benchmarks.gpu_check.ranks import WORDS, Seat, list_ways, run_ranks
from benchmarks.gpu_check.subject import MICROBATCHES, Subject, make_subject
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.pipeline import Pipeline

CLOSE = 1e-3
"""Largest relative difference of losses and gradients in float32, summed in another order."""

LIMIT_S = 45.0


def two_stages(given: Given) -> Result:
    """Compare a pipeline of two stages with the unsplit model, on this device."""
    result: Result = {"one_process": {}, "ways": {}, "way": None}
    try:
        result["one_process"] = in_one_process(given)
    except Exception as error:  # noqa: BLE001 (the ranks are to be tried all the same)
        result["one_process"] = {"error": f"{type(error).__name__}: {_short(str(error))}"}
    with tempfile.TemporaryDirectory() as folder:
        for way in list_ways(given.device):
            try:
                ranks = run_ranks(train, way, 2, Path(folder) / way, LIMIT_S, small=given.small)
            except RuntimeError as error:
                result["ways"][way] = {"error": _short(str(error))}
                sys.stderr.write(f"{way}: {_short(str(error))}\n")
                continue
            result["ways"][way] = {"ranks": ranks}
            if result["way"] is None and all(_is_close(found) for found in ranks):
                result["way"], result["words"] = way, WORDS[way]
    alone = result["one_process"]
    if "error" in alone or not _is_close(alone):
        words = alone.get("error", "another result than the model's")
        raise Failed(f"two stages in one process: {words}", result)
    # Ways of a GPU may be refused by the machine, as NCCL refuses two ranks on one; not this one.
    if words := result["ways"].get("emulated", {}).get("error"):
        raise Failed(f"as on NCCL: {words}", result)
    if result["way"] is None:
        raise Failed("in two processes no way gave what the model computes", result)
    wrong = [
        way
        for way, found in result["ways"].items()
        if not all(_is_close(rank) for rank in found.get("ranks", ()))
    ]
    if wrong:
        raise Failed(f"other results than the model's by {', '.join(wrong)}", result)
    return result


def in_one_process(given: Given) -> dict[str, Any]:
    """Train both stages on the one device."""
    device = torch.device(given.device)
    subject = make_subject(device, 2, small=given.small)
    whole = copy.deepcopy(subject.model)
    pipeline = Pipeline(subject.model, subject.plan, devices=[device, device])
    loss = Subject.loss(pipeline(subject.tokens), subject.tokens)
    loss.backward()
    expected = _train_whole(whole, subject)
    return {
        "device": str(device),
        "loss": _relative(float(loss.detach()), expected),
        "gradients": _differences(pipeline, whole),
    }


def train(seat: Seat) -> dict[str, Any]:
    """Take one step as a rank, and compare it with the whole model's."""
    subject = make_subject(seat.device, seat.num_ranks, small=seat.small)
    whole = copy.deepcopy(subject.model)
    pipeline = DistributedPipeline(subject.model, subject.plan, loss_fn=Subject.loss)
    loss = pipeline.step(subject.tokens, target=subject.tokens)
    expected = _train_whole(whole, subject)
    found = {
        "device": str(pipeline.device),
        "gradients": _differences(pipeline.module, whole),
        "loss": None if loss is None else _relative(float(loss.detach()), expected),
    }
    pipeline.barrier()
    pipeline.close()
    return found


def _train_whole(model: nn.Module, subject: Subject) -> float:
    total = 0.0
    for tokens in subject.tokens.chunk(MICROBATCHES):
        loss = Subject.loss(model(tokens), tokens) / MICROBATCHES
        loss.backward()
        total += float(loss.detach())
    return total


def _differences(part: nn.Module, whole: nn.Module) -> float:
    """Return the largest relative difference of a gradient; infinite if there is none."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    largest, count = 0.0, 0
    for name, parameter in part.named_parameters():
        theirs = expected[name].grad
        if parameter.grad is None or theirs is None:
            return float("inf")
        largest = max(largest, float((parameter.grad - theirs).norm() / theirs.norm()))
        count += 1
    return largest if count else float("inf")


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def _is_close(found: dict[str, Any]) -> bool:
    return bool(found["gradients"] <= CLOSE and (found["loss"] or 0.0) <= CLOSE)


def _short(words: str) -> str:
    """Return the lines of an error that say most: the first, and NCCL's own last one."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or [""]
    return " / ".join(dict.fromkeys([lines[0], lines[-1]]))


if __name__ == "__main__":
    sys.exit(run_program(two_stages))
