"""Ranks that print, for each variant, what made their hosts wait in each of a few steps."""

from __future__ import annotations

import copy
import functools
import json
import sys
from typing import Any

import torch

from stagewright.core.profile.profile import Profile
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.nccl.host_tensor import on_host
from tests.nccl.launch_log import LOG
from tests.nccl.launches import Connect, DeviceSynchronise, Entry, HostRead, Launch
from tests.runtime.equality_worker import plan_of
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import Case, make_batch, make_case, traced_profile

STEPS = 3


def main() -> None:
    """Print a line of JSON for each rank and variant."""
    torch.set_num_threads(1)
    count, variants = int(sys.argv[1]), json.loads(sys.argv[2])
    cases = {}
    for name in dict.fromkeys(variant["model"] for variant in variants):
        case = make_case(name)
        cases[name] = (case, traced_profile(case))
    run_forked(count, functools.partial(take_steps, variants, cases))


def take_steps(variants: list[dict[str, Any]], cases: dict[str, tuple[Case, Profile]]) -> None:
    init_process_group(backend="gloo", timeout_s=60)
    for index, variant in enumerate(variants):
        case, profile = cases[variant["model"]]
        plan = plan_of(variant, profile, torch.float32)
        options = {key: variant[key] for key in ("batch_statistics", "strategy") if key in variant}
        pipeline = DistributedPipeline(
            copy.deepcopy(case.model), plan, loss_fn=case.loss_fn, **options
        )
        batch, target = make_batch(case, plan)
        values = on_host(list(batch.values()) if isinstance(batch, dict) else list(batch))
        found, summed, start = [], [], len(LOG.entries)
        for _ in range(STEPS):
            began = len(LOG.entries)
            pipeline.step(*values, target=on_host(target))
            done = LOG.entries[began:]
            found.append([words for entry in done if (words := wait_in(entry))])
            summed.append([words for entry in done if (words := collective_in(entry))])
        pipeline.barrier()
        connected = sum(isinstance(entry, Connect) for entry in LOG.entries[start:])
        print_line(
            {
                "variant": index, "rank": pipeline.rank, "waits": found, "collectives": summed,
                "connected": connected, "weights": sizes_of(pipeline.module),
            }
        )  # fmt: skip
        pipeline.close()


def wait_in(entry: Entry) -> str | None:
    """What the host waits for, if it does."""
    return entry.what if isinstance(entry, HostRead | DeviceSynchronise) else None


def collective_in(entry: Entry) -> str | None:
    """Return the words of a collective that several ranks launch together."""
    return entry.what if isinstance(entry, Launch) and entry.sender is None else None


def sizes_of(module: torch.nn.Module) -> dict[str, int]:
    """Return the number of elements of every weight."""
    return {name: weight.numel() for name, weight in module.named_parameters()}


if __name__ == "__main__":
    main()
