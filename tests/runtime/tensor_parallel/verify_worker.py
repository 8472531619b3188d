"""Ranks that verify plans with split layers, as they are or with a defect."""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stagewright.capture.capture import trace
from stagewright.core.plan.plan import Plan
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.runtime.replicas.gradient_sync import GradientSync
from stagewright.runtime.tensor_parallel import exchange
from stagewright.runtime.verify_distributed import verify_distributed
from stagewright.schedules.plan_schedule import count_ranks
from tests.runtime.forked import print_line, run_forked
from tests.runtime.tensor_parallel.models import Example, make_example
from tests.runtime.tensor_parallel.plans import Mix, write_plan

MICROBATCHES = 4


def keep_part(_: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
    """Stand for a sum of the ranks' parts that was left out."""
    return value.clone()


DEFECTS = {
    "none": contextlib.nullcontext,
    "products are not summed": partial(
        mock.patch.object, exchange._Add, "forward", staticmethod(keep_part)
    ),
    "gradients of inputs are not summed": partial(
        mock.patch.object,
        exchange._Enter,
        "backward",
        staticmethod(lambda ctx, gradient: (gradient, None)),
    ),
    "replicas do not meet": partial(
        mock.patch.object, GradientSync, "finish", mock.Mock(return_value=None)
    ),
}
"""Contexts in which something is left out."""


def one_rank(cases: list[tuple[Example, Plan, str]]) -> None:
    init_process_group(backend="gloo", timeout_s=120)
    for number, (example, plan, defect) in enumerate(cases):
        group = dist.new_group(list(range(count_ranks(plan))))
        if dist.get_rank() < count_ranks(plan):
            batch, target = example.draw_batch(MICROBATCHES)
            with DEFECTS[defect]():
                found = verify_distributed(
                    example.model, plan, batch, target, example.loss_fn, group=group
                )
            print_line(
                {"case": number, "rank": dist.get_rank(),
                 "worst": found.worst, "loss": found.loss, "gradients": found.gradients,
                 "buffers": found.buffers, "missing": found.missing, "unknown": found.unknown}
            )  # fmt: skip
            dist.destroy_process_group(group)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    cases = []
    for name, mix, defect, dropout in json.loads(sys.argv[1]):
        example = make_example(name, dropout=dropout)
        captured = trace(example.model, example.sample, check=False)
        trained = mix[:1] if mix[1:] == ["forward_only"] else mix
        plan = write_plan(captured, Mix(*trained), MICROBATCHES)
        if trained is not mix:
            plan = plan.model_copy(update={"schedule": "forward_only"})
        cases.append((example, plan, defect))
    run_forked(4, partial(one_rank, cases))


if __name__ == "__main__":
    main()
