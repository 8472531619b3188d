"""Memory of devices that split layers, share optimizer state or shards: predicted and measured.

A scaled-down language model (8 blocks 1024 wide, 59 M parameters, of which table and head have the
share of Llama-3 8B's, 7 % each) in float32 with Adam, planned by the planner from an estimate and
trained on four gloo ranks; measured are a rank's resident bytes in its third step until the update,
above those that it had when the same had been done for a model 64 wide. Exits 1 if a prediction is
more than 5 % off; those of zero1 may be as much higher as dealing out whole weights leaves open,
those of fully_shard by a copy of the largest layer's gradient, which is not seen here.
The planner's choice for 8B on 8 GPUs of 80 GB is two stages of replicas with zero1.

    python benchmarks/parallel_memory.py --write docs/evidence/split-layers.md
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, Peak, resident_bytes
from tables import markdown_table, write_between_marks
from torch import Tensor, nn

import stagewright
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.meta_init.weights import Weights

RANKS, MICROBATCHES, ALLOWED = 4, 4, 0.05
DEALT = 0.1
"""Likewise of zero1, whose plans count the most that dealing out whole weights leaves a replica."""
SHARDED = 0.2
"""Likewise of fully_shard, whose plans count a second copy of the largest layer's gradient."""

VOCABULARY, WIDTH, BLOCKS, SAMPLES, LENGTH = 4096, 1024, 8, 1, 64
SMALL, MIB = 64, 2**20
WAYS: dict[str, dict[str, Any]] = {
    "layers over 4": {"tensor": 4, "num_stages": 1},
    "layers over 2, 2 stages": {"tensor": 2, "num_stages": 2},
    "layers over 2, 2 replicas, zero1": {
        "tensor": 2, "num_stages": 1, "max_replicas": 2, "strategies": ("zero1",),
    },
    "2 stages of 2 replicas, zero1": {
        "num_stages": 2, "max_replicas": 2, "strategies": ("zero1",),
    },
    "4 replicas": {"num_stages": 1, "max_replicas": 4},
    "4 replicas, zero1": {"num_stages": 1, "max_replicas": 4, "strategies": ("zero1",)},
    "4 replicas, fully_shard": {
        "num_stages": 1, "max_replicas": 4, "strategies": ("fully_shard",),
    },
}  # fmt: skip


class Twin(nn.Module):
    """A table, blocks of linear layers and a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY * width // WIDTH, width)
        self.blocks = nn.ModuleList(_Feed(width) for _ in range(BLOCKS))
        self.lm_head = nn.Linear(width, VOCABULARY * width // WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.lm_head(x)
        return made


class _Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        made: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return made


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_plan(way: dict[str, Any], width: int = WIDTH) -> Plan:
    """Plan the twin on a node of four."""
    with torch.device("meta"):
        profile = stagewright.estimate(
            Twin(width), torch.zeros(SAMPLES, LENGTH, dtype=torch.long), device="A100",
            precision="float32",
        )  # fmt: skip
    options = PlanOptions(num_microbatches=MICROBATCHES, precision="fp32", **way)
    return stagewright.plan(profile, "1x4x80GB", options)


def train(plan: Plan, width: int) -> int:
    """Train three steps; return the most bytes resident in the last one."""
    with torch.device("meta"):
        model = Twin(width)
    pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn, weights=Weights(seed=0))
    optimizer = pipeline.optimizer(torch.optim.Adam, lr=1e-4)
    ids = torch.randint(0, VOCABULARY * width // WIDTH, (SAMPLES * MICROBATCHES, LENGTH))
    for _ in range(3):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with Peak() as peak:
            pipeline.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()
    return peak.size_bytes


def measure(plan: Plan, small: Plan, rank: int, folder: str) -> int:
    """Return the bytes of a rank at its peak, beyond what the same code holds of a tiny model."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    train(small, SMALL)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident_bytes()
    return train(plan, WIDTH) - before


def run(plan: Plan, small: Plan) -> list[int]:
    """Return the peak of each rank, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                found = measure(plan, small, rank, folder)
                Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit("a rank failed")
        return [int(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=list(WAYS), action="append")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for setting in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL("libc.so.6").mallopt(setting, 64 * 2**10)
    rows, is_off = [], False
    for name in given.way or WAYS:
        plan = make_plan(WAYS[name])
        measured = run(plan, make_plan(WAYS[name], SMALL))
        predicted = [stage.memory.total_bytes for stage in plan.stages]
        # Plans state what the fullest of a stage's devices holds.
        ranks = iter(measured)
        measured = [max(next(ranks) for _ in stage.devices) for stage in plan.stages]
        pairs = zip(predicted, measured, strict=True)
        largest = max(((ours - theirs) / theirs for ours, theirs in pairs), key=abs)
        shares = WAYS[name].get("strategies", ())
        most = SHARDED if "fully_shard" in shares else DEALT if "zero1" in shares else ALLOWED
        is_off |= not -ALLOWED <= largest <= most
        sizes = [f"{max(each) / MIB:.0f}" for each in (predicted, measured)]
        rows.append((name, *sizes, f"{largest:+.1%}"))
        print(*rows[-1], flush=True)
    head = ("devices", "predicted MiB", "measured MiB", "largest error")
    text = markdown_table(head, rows, left=1)
    if given.write:
        write_between_marks(given.write, "parallel_memory.py", text)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
