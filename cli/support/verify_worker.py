"""Process started by `launch_ranks` to verify a plan: one rank of it, and its step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...profiler.models.families import build_loss, build_model, training_batch
from ...runtime.ranks.process_groups import end_process, init_process_group
from ...runtime.verify import DOUBLE, Verification, join_samples, seed_generators
from ...runtime.verify_distributed import verify_distributed
from ...schedules.plan_schedule import count_ranks
from .child_process import end_with_owner
from .launch_ranks import PROCESS_BYTES, check_memory, write_error
from .load_object import OwnModel


def main() -> int:
    """Verify as the command line says and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--single", action="store_true")
    OwnModel.add_arguments(parser)
    given = parser.parse_args()
    end_with_owner(given.results)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ["RANK"])
    try:
        found = verify_here(
            Plan.read(given.plan), OwnModel.read_arguments(given), given.seed,
            None if given.single else DOUBLE, given.timeout,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 (the launcher raises it)
        write_error(given.results, rank, error)
        end_process(1)
    if rank == 0:
        result = json.dumps(dataclasses.asdict(found))
        (given.results / "result.json").write_text(result, encoding="utf-8")
    return 0


def verify_here(
    plan: Plan, own: OwnModel | None, seed: int, dtype: torch.dtype | None, timeout_s: float
) -> Verification:
    """Verify a plan on this rank and the others, on CPUs."""
    init_process_group(backend="gloo", timeout_s=timeout_s)
    found = verify_distributed(*build_step(plan, own, seed), dtype=dtype)
    dist.destroy_process_group()
    return found


def check_machine(plan: Plan, own: OwnModel | None, *, is_single: bool) -> None:
    """Check that this machine can verify a plan on as many processes as the plan has devices.

    Raises:
        InvalidInput: This build of torch has no gloo.
        OutOfMemory: Memory is short; the message has both numbers.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise InvalidInput(
            "verifying layers that are split takes processes, which talk by gloo, and this build "
            "of torch has none; install another build, or plan with --tensor 1"
        )
    ranks, elements = count_ranks(plan), _count_elements(plan, own)
    size = 4 if is_single else 8
    # Each process builds the model and copies it; one has it unsplit as well, with gradients.
    required = ranks * (PROCESS_BYTES + (4 + size) * elements) + 2 * size * elements
    check_memory(
        required,
        f"verifying layers that are split takes {ranks} processes, each with a copy of "
        f"{elements:,} parameters",
        "verify where there is more, or a plan of fewer blocks on fewer devices, whose layers "
        "split alike",
    )


def _count_elements(plan: Plan, own: OwnModel | None) -> int:
    if own is not None:
        model = own.build()
    else:
        assert plan.spec is not None, "checked before"
        with torch.device("meta"):
            model = build_model(plan.spec)
    return sum(parameter.numel() for parameter in model.parameters())


def build_step(plan: Plan, own: OwnModel | None, seed: int) -> tuple[Any, Plan, Any, Any, Any]:
    """Return what `verify` takes: model, plan, batch, target and loss; equal for equal seeds."""
    # Seeded before the model is built, so that its initial weights are reproducible.
    seed_generators(seed)
    if own is not None:
        module, loss_fn = own.build(), own.load_loss()
        batch, target = map(join_samples, own.make_microbatches(plan))
        return module, plan, batch, target, loss_fn
    assert plan.spec is not None, "a model of one's own is named"
    inputs, target = training_batch(plan.spec, plan.inputs, plan.num_microbatches, seed=seed)
    names = {spec.name for spec in plan.inputs}
    batch = inputs if names == set(inputs) else tuple(inputs.values())
    return build_model(plan.spec), plan, batch, target, build_loss(plan.spec)


if __name__ == "__main__":
    sys.exit(main())
