"""Our executor against torch's own Schedule1F1B: the same model, cuts and micro-batches.

Two ranks, each pinned to a core, take a step by one engine and then by the other, again and again;
what counts is the ratio within such a pair, so that a machine that slows down slows both. The
interval is a bootstrap's over the pairs. torch's engine is driven as its documentation does:
`PipelineStage` and `Schedule1F1B.step` of whole batches, with nothing of ours but the stage's
module and the loss; gradients of weights that both stages hold are summed after the step. Exits 1
when our throughput is below 0.98 of torch's.

    python benchmarks/throughput.py --write docs/evidence/throughput.md
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from tables import markdown_table, write_between_marks
from torch_schedule import TorchPipeline

from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    ModelSpec,
    ResNetConfig,
    ResNetSpec,
)
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.links.launch_local import free_port
from stagewright.profiler.machine.memory import keep_freed_memory
from stagewright.profiler.models.families import build_loss, build_model, training_batch
from stagewright.runtime.distributed import DistributedPipeline

ALLOWED = 0.98
RANKS = 2
MICROBATCHES = 8
RESAMPLES = 10_000
MODELS: dict[str, tuple[ModelSpec, dict[str, tuple[int, ...]]]] = {
    "GPT-2, 6 blocks 256 wide": (
        GPT2Spec(
            family="gpt2",
            config=GPT2Config(
                n_layer=6, n_embd=256, n_head=8, vocab_size=2048, n_positions=128, dropout=0.0
            ),
        ),
        {"input_ids": (2, 128)},
    ),
    "ResNet-50, 16 wide": (
        ResNetSpec(family="resnet", config=ResNetConfig(depth=50, width=16, num_classes=100)),
        {"x": (4, 3, 64, 64)},
    ),
}


def run(rank: int, port: int, pairs: int, path: str) -> None:
    """One rank of all models; rank 0 writes the pairs of step times."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {name: _pairs(name, pairs, rank) for name in MODELS}
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def _pairs(name: str, pairs: int, rank: int) -> list[tuple[float, float]]:
    """Step times by torch's engine and by ours, pair by pair."""
    spec, shapes = MODELS[name]
    torch.manual_seed(0)
    model = build_model(spec)
    sample: Any = {
        key: torch.randint(0, 64, shape) if key == "input_ids" else torch.randn(shape)
        for key, shape in shapes.items()
    }
    captured = trace(model, sample, check=False)
    layers = tuple(
        LayerProfile(layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2))
        for layer in captured.graph.layers
    )
    profile = Profile(
        model=captured.graph.model,
        inputs=captured.graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=layers,
        boundaries=captured.graph.boundaries,
        parameters=captured.graph.parameters,
    )
    half = len(layers) // 2
    options = PlanOptions(num_microbatches=MICROBATCHES)
    plan = plan_from_balance(profile, Cluster.uniform(RANKS), options, [half, len(layers) - half])
    loss_fn = build_loss(spec)
    pipelines: dict[str, TorchPipeline | DistributedPipeline] = {
        "torch": TorchPipeline(copy.deepcopy(model), plan, loss_fn, rank),
        "stagewright": DistributedPipeline(copy.deepcopy(model), plan, loss_fn=loss_fn),
    }
    inputs, target = training_batch(spec, plan.inputs, MICROBATCHES, seed=1)
    times: dict[str, list[float]] = {engine: [] for engine in pipelines}
    for repeat in range(pairs + 2):
        order = list(pipelines.items())
        for engine, pipeline in order if repeat % 2 else reversed(order):
            dist.barrier()
            began = time.perf_counter()
            pipeline.step(*inputs.values(), target=target)
            dist.barrier()
            times[engine].append(time.perf_counter() - began)
    return list(zip(times["torch"][2:], times["stagewright"][2:], strict=True))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the middle 95 % of medians of resampled pairs."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    head = ("model", "torch's Schedule1F1B", "ours", "our throughput over torch's", "95 %")
    cells = [
        (
            row["model"],
            f"{row['torch_s'] * 1e3:.1f} ms",
            f"{row['ours_s'] * 1e3:.1f} ms",
            f"{row['throughput_ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*row["interval"]),
        )
        for row in rows
    ]
    return markdown_table(head, cells, left=len(head))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    path = f"{os.environ.get('TMPDIR', '/tmp')}/throughput-{os.getpid()}.json"
    torch.multiprocessing.spawn(run, (free_port(), given.pairs, path), nprocs=RANKS)
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    os.unlink(path)
    rows = []
    for name, pairs in found.items():
        ratios = [theirs / ours for theirs, ours in pairs]
        low, high = interval(ratios)
        rows.append(
            {
                "model": name,
                "torch_s": statistics.median(theirs for theirs, _ in pairs),
                "ours_s": statistics.median(ours for _, ours in pairs),
                "throughput_ratio": statistics.median(ratios),
                "interval": [low, high],
                "pairs": len(pairs),
            }
        )
    if given.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(table(rows))
    if given.write:
        write_between_marks(given.write, "throughput.py", table(rows))
    return int(any(row["throughput_ratio"] < ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
