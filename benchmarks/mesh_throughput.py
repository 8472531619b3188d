"""Pipelines of split and of sharded stages against the same meshes built by hand with torch.

Four gloo ranks, two stages of two: their layers split over both (tensor parallelism, DTensor by
hand), or their weights sharded (FSDP2 by hand), under torch's Schedule1F1B. Ranks take a step by
one and then by the other, again and again; what counts is the ratio within such a pair. Exits 1
below 0.97 of torch's throughput where layers are split. Sharded stages have no limit: both gather
weights for every pass, but torch's schedule keeps whole gradients until the last micro-batch, which
it alone reduces, where ours reduces every one and holds shards.

    python benchmarks/mesh_throughput.py --write docs/evidence/split-layers.md
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from tables import markdown_table, write_between_marks
from throughput import interval
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.links.launch_local import free_port
from stagewright.profiler.machine.memory import keep_freed_memory
from stagewright.runtime.distributed import DistributedPipeline

ALLOWED = 0.97
RANKS, STAGES, WIDTH = 4, 2, 2
MICROBATCHES, SAMPLES, LENGTH = 8, 2, 128
VOCABULARY, HIDDEN, HEADS, BLOCKS = 2048, 256, 8, 4


class Block(nn.Module):
    """A block of Llama's shape; the number of heads follows from the weights held."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        query, key, value = (
            made.view(*made.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2)
            for made in (self.query(y), self.key(y), self.value(y))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A table, blocks and a head; parts that are `None` are another stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.table: nn.Module | None = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head: nn.Module | None = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None else self.table(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


BY_COLUMNS = ("query", "key", "value", "gate", "up")
BY_ROWS = ("output", "down")


def split_by_hand(part: Model, mesh: DeviceMesh) -> None:
    """Split the weights of a stage as torch's tutorial on tensor parallelism does."""
    for block in part.blocks:
        columns = {name: ColwiseParallel() for name in BY_COLUMNS}
        rows = {name: RowwiseParallel() for name in BY_ROWS}
        parallelize_module(block, mesh, {**columns, **rows})
    if part.table is not None:
        parallelize_module(part, mesh, {"table": RowwiseParallel(input_layouts=Replicate())})
    if part.head is not None:
        parallelize_module(part, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def shard_by_hand(part: Model, mesh: DeviceMesh) -> None:
    """Shard the weights of a stage over its replicas; they are gathered for every pass."""
    for block in part.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(part, mesh=mesh)


class HandMade:
    """Pipeline of the same stages on a mesh of torch's, with its own schedule."""

    def __init__(self, model: Model, kind: str) -> None:
        mesh = init_device_mesh("cpu", (STAGES, WIDTH), mesh_dim_names=("pp", "in_stage"))
        self._stage, self._place = mesh.get_coordinate() or [0, 0]
        self._shares = WIDTH if kind == "sharded" else 1
        half = BLOCKS // STAGES
        model.blocks = model.blocks[self._stage * half : (self._stage + 1) * half]
        if self._stage:
            model.table = None
        else:
            model.head = None
        inside: Callable[[Model, DeviceMesh], None] = (
            shard_by_hand if kind == "sharded" else split_by_hand
        )
        inside(model, mesh["in_stage"])
        self.module = model
        group = mesh.get_group("pp")
        stage = PipelineStage(model, self._stage, STAGES, torch.device("cpu"), group=group)
        self._schedule = Schedule1F1B(stage, MICROBATCHES // self._shares, loss_fn=loss_fn)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """Take a step; replicas of sharded stages take their share of the batch."""
        mine = slice(self._place if self._shares > 1 else 0, None, self._shares)
        ids, target = (each.view(-1, SAMPLES, LENGTH)[mine].flatten(0, 1) for each in (ids, target))
        if self._stage == 0:
            self._schedule.step(ids)
        else:
            self._schedule.step(target=target, losses=[])


def make_plan(model: Model, kind: str) -> Plan:
    """Return the plan of the same two stages."""
    sample = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    captured = trace(model, sample, check=False)
    profile = Profile(
        model=captured.graph.model,
        inputs=captured.graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2))
            for layer in captured.graph.layers
        ),
        boundaries=captured.graph.boundaries,
        parameters=captured.graph.parameters,
    )
    half = BLOCKS // STAGES + 1
    replicas = [WIDTH] * STAGES if kind == "sharded" else []
    plan = plan_from_balance(
        profile,
        Cluster.uniform(RANKS if kind == "sharded" else STAGES),
        PlanOptions(num_microbatches=MICROBATCHES),
        [half, half],
        replicas=replicas,
    )
    changes: dict[str, Any] = (
        {"strategy": "fully_shard"} if kind == "sharded" else {"tensor": WIDTH}
    )
    stages = [
        stage.model_copy(
            update={**changes, "devices": tuple(f"{index}.{at}" for at in range(WIDTH))}
        )
        for index, stage in enumerate(plan.stages)
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def run(rank: int, port: int, pairs: int, path: str) -> None:
    """Run one rank of both kinds of stages; rank 0 writes the pairs of step times."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {kind: _pairs(kind, pairs) for kind in ("split", "sharded")}
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    os._exit(0)


def _pairs(kind: str, pairs: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = Model()
    plan = make_plan(copy.deepcopy(model), kind)
    engines: dict[str, Any] = {
        "torch": HandMade(copy.deepcopy(model), kind),
        "ours": DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn),
    }
    ids = torch.randint(0, VOCABULARY, (SAMPLES * MICROBATCHES, LENGTH))
    steps = {
        "torch": lambda: engines["torch"].step(ids, ids),
        "ours": lambda: engines["ours"].step(ids, target=ids),
    }
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for repeat in range(pairs + 2):
        order = list(steps)
        for engine in order if repeat % 2 else reversed(order):
            engines[engine].module.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            steps[engine]()
            dist.barrier()
            times[engine].append(time.perf_counter() - began)
    return list(zip(times["torch"][2:], times["ours"][2:], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    path = f"{os.environ.get('TMPDIR', '/tmp')}/mesh-{os.getpid()}.json"
    torch.multiprocessing.spawn(run, (free_port(), given.pairs, path), nprocs=RANKS)
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    os.unlink(path)
    rows, ratios = [], {}
    for kind, pairs in found.items():
        own = [theirs / ours for theirs, ours in pairs]
        ratios[kind] = statistics.median(own)
        rows.append(
            (
                f"two stages of two, {kind}",
                f"{statistics.median(theirs for theirs, _ in pairs) * 1e3:.0f} ms",
                f"{statistics.median(ours for _, ours in pairs) * 1e3:.0f} ms",
                f"{ratios[kind]:.3f}",
                "{:.3f} to {:.3f}".format(*interval(own)),
            )
        )
    head = ("four ranks", "by hand with torch", "ours", "our throughput over torch's", "95 %")
    text = markdown_table(head, rows, left=len(head))
    print(text)
    if given.write:
        write_between_marks(given.write, "mesh_throughput.py", text)
    return int(ratios["split"] < ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
