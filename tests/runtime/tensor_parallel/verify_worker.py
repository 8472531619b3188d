"""Ranks that verify plans with split layers, as they are or with a defect."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
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


def take_unsummed(self: Any, value: torch.Tensor, layout: Any) -> torch.Tensor:
    """Stand for a sum of the ranks' parts that was left out."""
    return self.take(value, layout).clone()


def patch_pass(forward: str, functions: list[type[torch.autograd.Function]]) -> Any:
    """Leave out sums in one pass of some of the exchanges."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for function in functions:
                own = getattr(function, forward)

                def without_sums(*args: Any, own: Any = own) -> Any:
                    with (
                        mock.patch.object(
                            exchange.ShardGroup, "sum", lambda _, value: value.clone()
                        ),
                        mock.patch.object(exchange.ShardGroup, "sum_part", take_unsummed),
                    ):
                        return own(*args)

                stack.enter_context(
                    mock.patch.object(function, forward, staticmethod(without_sums))
                )
            yield

    return patched


DEFECTS = {
    "none": contextlib.nullcontext,
    "products are not summed": patch_pass("forward", [exchange._Add, exchange._AddPart]),
    "gradients of inputs are not summed": patch_pass(
        "backward", [exchange._Enter, exchange._GatherEntered]
    ),
    "replicas do not meet": partial(
        mock.patch.multiple, GradientSync, finish=mock.Mock(), _send_complete=mock.Mock()
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
