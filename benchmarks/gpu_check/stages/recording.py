"""Recording of a step ends, on every rank, and gives a time for every action."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.program import Failed, Given, Result, run_program
from benchmarks.gpu_check.ranks import WORDS, Seat, run_ranks, way_found
from benchmarks.gpu_check.subject import MICROBATCHES, Subject, make_subject
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.trace import record

RANKS, STEPS, LIMIT_S = 2, 3, 75.0


def recording(given: Given) -> Result:
    """Record some steps of two ranks, and look at the timeline of the last."""
    way = way_found(given.folder, given.device)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            record_steps, way, RANKS, Path(folder) / "ranks", LIMIT_S, small=given.small
        )
    first = found[0]
    result: Result = {
        "way": way,
        "words": WORDS[way],
        "device": first["device"],
        "wall_s": first["wall_s"],
        "recorded_s": first["timeline"]["step_time_s"],
        "bubble_fraction": first["timeline"]["bubble_fraction"],
        "timeline": first["timeline"],
    }
    if fault := find_fault(first["timeline"], first["wall_s"]):
        raise Failed(fault, result)
    if any(other["timeline"] != first["timeline"] for other in found):
        raise Failed("ranks were given different timelines", result)
    return result


def record_steps(seat: Seat) -> dict[str, Any]:
    """Take steps as a rank while they are recorded."""
    subject = make_subject(seat.device, seat.num_ranks, small=seat.small)
    pipeline = DistributedPipeline(subject.model, subject.plan, loss_fn=Subject.loss)
    with record(pipeline) as trace:
        for _ in range(STEPS):
            pipeline.barrier()
            start = time.perf_counter()
            pipeline.step(subject.tokens, target=subject.tokens)
            if pipeline.device.type == "cuda":
                torch.cuda.synchronize()
            pipeline.barrier()
            wall_s = time.perf_counter() - start
        timeline = trace.timeline()
    pipeline.close()
    return {
        "device": str(pipeline.device),
        "wall_s": wall_s,
        "timeline": json.loads(timeline.to_json()),
    }


def find_fault(timeline: dict[str, Any], wall_s: float) -> str | None:
    """Return what is wrong with a timeline of a step that took this long; None if nothing is."""
    events = timeline["events"]
    if len(events) != 2 * RANKS * MICROBATCHES:
        return f"{len(events)} actions were recorded instead of {2 * RANKS * MICROBATCHES}"
    if any(event["end_s"] <= event["start_s"] for event in events):
        return "an action takes no time"
    if not 0 < timeline["step_time_s"] <= 1.1 * wall_s:
        return f"the step took {wall_s:.4f} s, and {timeline['step_time_s']:.4f} s were recorded"
    return None


if __name__ == "__main__":
    sys.exit(run_program(recording))
