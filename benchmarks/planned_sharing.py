"""Compare the planned memory of replicas that share weights with what a real step holds.

    python benchmarks/planned_sharing.py

Replicas of one stage of linear layers train in processes with Adam, their weights, gradients and
state shared by ``fully_shard``. What the first of them holds is the sum of all its tensors'
storages when the last backward has ended and gradients are about to be reduced: whole weights and
gradients beside its parts. The plan counts the workspace of a backward besides. Exits with 1 if the
two differ by more than 5 %.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_memory import LAYERS, STEPS, WIDTH, made
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

import stagewright
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.replicas.sharded import ShardedStage


def planned(replicas: int) -> Plan:
    """One stage whose replicas share everything; estimated, as no time matters here."""
    with torch.device("meta"):
        profile = stagewright.estimate(
            made(), torch.empty(2, WIDTH), device="A100", precision="float32"
        )
    options = PlanOptions(num_microbatches=4, strategies=("fully_shard",))
    cluster = Cluster.uniform(replicas)
    return plan_from_balance(profile, cluster, options, [LAYERS], replicas=[replicas])


def live_bytes() -> int:
    """Return the bytes of all storages of this process's tensors, each once."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor):
            continue
        if found.device.type == "meta":
            continue
        local = found._local_tensor if isinstance(found, DTensor) else found
        for tensor in (local, local.grad if local.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def measure(plan: Plan, rank: int, world: int, folder: str) -> int:
    """Train a few steps; return the most that was held before gradients were reduced."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    before, most, model = live_bytes(), [0], made()
    pipeline = DistributedPipeline(model, plan, loss_fn=nn.functional.mse_loss)
    del model
    updates = torch.optim.Adam(pipeline.module.parameters(), lr=1e-3)
    finish = ShardedStage.finish

    def look(stage: ShardedStage) -> None:
        gc.collect()
        most[0] = max(most[0], live_bytes() - before)
        finish(stage)

    ShardedStage.finish = look  # type: ignore[method-assign]
    batch = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        pipeline.step(batch, target=batch)
        updates.step()
        updates.zero_grad()
    pipeline.close()
    dist.destroy_process_group()
    return most[0]


def held_bytes(plan: Plan, world: int) -> int:
    """Return what the first of the replicas holds, each in a process."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                found = measure(plan, rank, world, folder)
                Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit(f"{world} replicas failed")
        return int(json.loads(Path(folder, "0.json").read_text(encoding="utf-8")))


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # looking at every object finds some that are deprecated
    worst = 0.0
    for world in (2, 4):
        plan = planned(world)
        memory, held = plan.stages[0].memory, held_bytes(plan, world)
        difference = memory.total_bytes / held - 1
        worst = max(worst, abs(difference))
        print(
            f"{world} replicas: planned {memory.total_bytes} bytes ({memory.workspace_bytes} of "
            f"them workspace), held {held}, {difference:+.1%}"
        )
    return 1 if worst > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
