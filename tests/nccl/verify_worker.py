"""Two ranks, of which the second alone verifies plans; print what its host waited for."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from stagewright.core.profile.profile import Profile
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.runtime.verify import verify
from tests.nccl.host_tensor import on_host
from tests.nccl.launch_log import LOG
from tests.nccl.launches import DeviceSynchronise, Launch
from tests.runtime.equality_worker import plan_of
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import Case, make_batch, make_case, traced_profile


def main() -> None:
    """Print a line of JSON for each variant."""
    torch.set_num_threads(1)
    variants = json.loads(sys.argv[1])
    cases = {}
    for name in dict.fromkeys(variant["model"] for variant in variants):
        case = make_case(name)
        cases[name] = (case, traced_profile(case))
    run_forked(2, functools.partial(verify_on_one, variants, cases))


def verify_on_one(variants: list[dict[str, Any]], cases: dict[str, tuple[Case, Profile]]) -> None:
    """The first rank waits at the barrier meanwhile."""
    init_process_group(backend="gloo", timeout_s=60)
    for variant in variants if dist.get_rank() == 1 else []:
        case, profile = cases[variant["model"]]
        plan = plan_of(variant, profile, torch.float32)
        batch, target = make_batch(case, plan)
        began = len(LOG.entries)
        found = verify(
            case.model, plan, on_host(batch), on_host(target), case.loss_fn, dtype=torch.float64
        )
        done = LOG.entries[began:]
        print_line(
            {
                "worst": found.worst,
                "launches": sum(isinstance(entry, Launch) for entry in done),
                "synchronises": sum(isinstance(entry, DeviceSynchronise) for entry in done),
            }
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
