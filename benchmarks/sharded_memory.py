"""Measure a replica's memory by strategy and optimizer, at its peak and between steps.

Replicas of one stage of linear layers on this machine; memory is the process's resident bytes above
those before the model was made. Beside it is what a plan counts, but for ``ddp``, which none has.

    python benchmarks/sharded_memory.py [--json] [--strategies fully_shard] [--optimizers adam]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stagewright
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.models.training_memory import Optimizer
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.replicas.strategy import Strategy

WIDTH, LAYERS, STEPS, SAMPLES = 2048, 8, 3, 2
STRATEGIES: tuple[Strategy, ...] = ("reduce", "ddp", "fully_shard")
OPTIMIZERS: dict[Optimizer, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Settings of glibc's mallopt, by which freed memory goes back to the system at once."""


@dataclass(frozen=True)
class Row:
    """Bytes of one replica, as multiples of the stage's weights."""

    strategy: Strategy
    optimizer: Optimizer
    replicas: int
    peak: float
    rest: float
    counted: float | None


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident bytes while it is open, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.size_bytes, self._is_open = 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        self._thread.join()

    def _watch(self) -> None:
        while self._is_open:
            self.size_bytes = max(self.size_bytes, resident_bytes())
            time.sleep(0.001)


def make_stage() -> nn.Module:
    """Return a stage of linear layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def estimate() -> Profile:
    """Estimate the stage, as no time matters here."""
    with torch.device("meta"):
        return stagewright.estimate(
            make_stage(), torch.empty(SAMPLES, WIDTH), device="A100", precision="float32"
        )


def make_plan(profile: Profile, strategy: Strategy, optimizer: Optimizer, replicas: int) -> Plan:
    """Plan one stage of these replicas, each with two micro-batches."""
    options = PlanOptions(
        num_microbatches=2 * replicas,
        optimizer=optimizer,
        strategies=("fully_shard" if strategy == "fully_shard" else "replicate",),
    )
    cluster = Cluster.uniform(replicas)
    return plan_from_balance(profile, cluster, options, [LAYERS], replicas=[replicas])


def measure(plan: Plan, strategy: Strategy, optimizer: Optimizer, rank: int, folder: str) -> Row:
    """Train a few steps and return the memory of the last one."""
    replicas = plan.stages[0].replicas
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=replicas,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    before = resident_bytes()
    model = make_stage()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    pipeline = DistributedPipeline(model, plan, loss_fn=nn.functional.mse_loss, strategy=strategy)
    del model
    updates = OPTIMIZERS[optimizer](pipeline.module.parameters(), lr=1e-3)
    batch = torch.randn(SAMPLES * plan.num_microbatches, WIDTH)
    for _ in range(STEPS):
        gc.collect()
        with Peak() as peak:
            pipeline.step(batch, target=batch)
            updates.step()
            updates.zero_grad()
    found = Row(
        strategy,
        optimizer,
        replicas,
        (peak.size_bytes - before) / weights,
        (resident_bytes() - before) / weights,
        None if strategy == "ddp" else plan.stages[0].memory.total_bytes / weights,
    )
    pipeline.close()
    dist.destroy_process_group()
    return found


def run_replicas(plan: Plan, strategy: Strategy, optimizer: Optimizer) -> Row:
    """Run all replicas, each in a process, and return the memory of the first."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(plan.stages[0].replicas):
            child = os.fork()
            if child == 0:
                row = measure(plan, strategy, optimizer, rank, folder)
                Path(folder, f"{rank}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit(f"{strategy} with {optimizer} failed")
        return Row(**json.loads(Path(folder, "0.json").read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=OPTIMIZERS)
    asked = parser.parse_args()
    wants_json = asked.json
    torch.set_num_threads(1)
    for setting in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL("libc.so.6").mallopt(setting, 64 * 2**10)
    profile = estimate()
    if not wants_json:
        print("times the weights: at its peak, at rest, counted")
    for replicas, optimizer, strategy in product((2, 4), asked.optimizers, asked.strategies):
        plan = make_plan(profile, strategy, optimizer, replicas)
        row = run_replicas(plan, strategy, optimizer)
        counted = "-" if row.counted is None else f"{row.counted:.2f}"
        text = (
            f"{replicas} replicas, {optimizer}, {strategy}: {row.peak:.2f} {row.rest:.2f} {counted}"
        )
        print(json.dumps(asdict(row)) if wants_json else text, flush=True)


if __name__ == "__main__":
    main()
