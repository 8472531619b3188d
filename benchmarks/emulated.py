"""Measured step times against simulated ones, with stages that sleep instead of computing.

On few cores real stages get in each other's way; stages that sleep do not, so what is left is the
executor: its order of work, its messages, its waiting. Every schedule runs on 4 and 8 ranks, and a
model with uneven layers runs cut into equal numbers of layers and as planned. Exits 1 when a step
is further than 5 % from the simulator's, or the gain of the plan further than 5 % from predicted.

    python benchmarks/emulated.py --write docs/evidence/throughput.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from tables import write_between_marks
from torch import Tensor, nn

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Boundary, Layer
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.plan.schedule import Schedule
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.engine.executor import Executor
from stagewright.runtime.engine.p2p import P2PChannels, find_connected_pairs, make_channel_groups
from stagewright.runtime.engine.stage import StageRunner
from stagewright.runtime.partition.routes import TensorRoute, TensorRoutes
from stagewright.runtime.ranks.process_groups import ProcessGroups
from stagewright.runtime.replicas.gradient_hooks import GradientHooks
from stagewright.runtime.replicas.replication import Replication
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.plan_schedule import schedule_of

ALLOWED = 0.05
WIDTH = 8
CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2, "zbv": 2,
          "dualpipev": 2}  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", *CHUNKS)
SKEWED_S = (4, 1, 1, 1, 6, 1, 1, 9, 1, 1, 1, 5, 1, 1, 2, 8)
"""Layers of a model whose time is not spread evenly, in tenths of the other stages' forward."""


@dataclass(frozen=True)
class Cell:
    """One schedule to run.

    Attributes:
        name: For the table.
        schedule: Of all ranks.
        forward_s: Of each stage.
        input_s: Backward to the inputs, of each stage.
        weight_s: Backward to the weights, of each stage.
    """

    name: str
    schedule: Schedule
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        times = StageTimes(
            forward_s=self.forward_s,
            backward_s=[a + b for a, b in zip(self.input_s, self.weight_s, strict=True)],
            backward_input_s=self.input_s,
            backward_weight_s=self.weight_s,
        )
        return simulate(self.schedule, times, with_events=False).step_time_s


@dataclass(frozen=True)
class Found:
    """Measurements of a cell."""

    name: str
    ranks: int
    predicted_s: float
    steps_s: list[float] = field(repr=False)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1


class _SleepOnSpine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, input_s: float) -> Tensor:
        ctx.input_s = input_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.input_s)
        return gradients[0], None, None


class _SleepAtWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_s: float) -> Tensor:
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.weight_s)
        return gradients[0], None


class Sleeping(nn.Module):
    """A stage that takes its time and no core."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._times_s = forward_s, input_s, weight_s

    def forward(self, value: Tensor) -> tuple[Tensor]:
        forward_s, input_s, weight_s = self._times_s
        spine = _SleepOnSpine.apply(value, forward_s, input_s)  # type: ignore[no-untyped-call]
        return (spine + _SleepAtWeight.apply(self.weight, weight_s),)  # type: ignore[no-untyped-call]


def cells(ranks: int, forward_s: float, num_microbatches: int) -> list[Cell]:
    """Every schedule, backwards as long as one forward to the inputs and another to the weights."""
    found = []
    for name in SCHEDULES:
        chunks = CHUNKS.get(name, 1)
        each = forward_s / chunks
        count = ranks * chunks
        schedule = make_schedule(name, count, num_microbatches, chunks=chunks)  # type: ignore[arg-type]
        found.append(Cell(name, schedule, (each,) * count, (each,) * count, (each,) * count))
    return found


def skewed_cells(ranks: int, unit_s: float, num_microbatches: int) -> list[Cell]:
    """Return a model with uneven layers, cut into equal numbers of layers and as planned."""
    layers = [
        LayerProfile(
            layer=Layer(name=f"layer.{index}"),
            forward=Timing(median_s=unit * unit_s),
            backward=Timing(median_s=2 * unit * unit_s),
        )
        for index, unit in enumerate(SKEWED_S)
    ]
    boundaries = tuple(Boundary(after=index) for index in range(len(layers) - 1))
    profile = Profile(model="Skewed", layers=tuple(layers), boundaries=boundaries)
    cluster, options = Cluster.uniform(ranks), PlanOptions(num_microbatches=num_microbatches)
    even = [len(SKEWED_S) // ranks] * ranks
    return [
        _of_plan("skewed, equal layers", plan_from_balance(profile, cluster, options, even)),
        _of_plan("skewed, planned", plan(profile, cluster, options)),
    ]


def _of_plan(name: str, made: Plan) -> Cell:
    halves = tuple(stage.backward_time_s / 2 for stage in made.stages)
    forwards = tuple(stage.forward_time_s for stage in made.stages)
    return Cell(name, schedule_of(made), forwards, halves, halves)


def run(rank: int, ranks: int, port: int, wanted: Sequence[Cell], steps: int, path: str) -> None:
    """One rank of all cells; rank 0 writes what was found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = []
    for cell in wanted:
        executor = _executor(cell, rank)
        begins, ends = [], []
        inputs = [(torch.zeros(1, WIDTH),)] * cell.schedule.num_microbatches
        targets = [torch.zeros(1)] * cell.schedule.num_microbatches
        for _ in range(steps + 1):
            dist.barrier()
            begins.append(time.monotonic())
            executor.train(inputs, targets)
            ends.append(time.monotonic())
        both: list[Any] = [None] * ranks
        dist.all_gather_object(both, (begins[1:], ends[1:]))  # the first step warms up
        first = [min(column) for column in zip(*(one[0] for one in both), strict=True)]
        last = [max(column) for column in zip(*(one[1] for one in both), strict=True)]
        steps_s = [end - begin for begin, end in zip(first, last, strict=True)]
        found.append(Found(cell.name, ranks, cell.predicted_s, steps_s))
        if rank == 0:
            print(row(found[-1]), file=sys.stderr, flush=True)
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([asdict(one) for one in found], file)
    dist.barrier()
    dist.destroy_process_group()


def _executor(cell: Cell, rank: int) -> Executor:
    groups = ProcessGroups(None)
    spec = TensorSpec(name="value", shape=(1, WIDTH), dtype="float32", requires_grad=True)
    count = cell.schedule.num_stages
    routes = TensorRoutes(
        [TensorRoute(index, index + 1, (spec,)) for index in range(count - 1)], count
    )
    cpu = torch.device("cpu")
    channels = make_channel_groups(
        groups, find_connected_pairs(cell.schedule.ranks, cell.schedule, routes)
    )
    transport = P2PChannels(rank, channels, groups.global_ranks, cpu)
    stages = {
        index: StageRunner(
            Sleeping(cell.forward_s[index], cell.input_s[index], cell.weight_s[index]),
            (spec,),
            (spec,) if index + 1 < count else (),
            (lambda flat, target: flat[0].sum()) if index + 1 == count else None,
            cpu,
        )
        for index in cell.schedule.stages_of(rank)
    }
    executor = Executor(
        cell.schedule,
        rank,
        routes,
        stages,
        transport,
        Replication(None, {}, GradientHooks({})),
        lambda words: None,
    )
    transport.connect()
    return executor


def row(found: Found) -> str:
    return (
        f"| {found.name} | {found.ranks} | {found.predicted_s * 1e3:.1f} ms | "
        f"{found.measured_s * 1e3:.1f} ms | {found.error:+.1%} |"
    )


HEAD = """| schedule | ranks | simulated | measured, median | prediction off by |
|---|---|---|---|---|"""


def gain(found: Sequence[Found]) -> tuple[float, float]:
    """Return the step time of equal layer counts over the plan's: predicted, measured."""
    even, planned = (next(f for f in found if f.name == f"skewed, {name}")
                     for name in ("equal layers", "planned"))  # fmt: skip
    return even.predicted_s / planned.predicted_s, even.measured_s / planned.measured_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--forward-ms", type=float, default=100.0, help="of all stages of a rank")
    parser.add_argument("--microbatches", type=int, default=2, help="for each rank")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    found: list[Found] = []
    gains: list[str] = []
    late = False
    for ranks in given.ranks:
        microbatches = given.microbatches * ranks
        wanted = cells(ranks, given.forward_ms / 1e3, microbatches)
        wanted += skewed_cells(ranks, given.forward_ms / 1e4, microbatches)
        path = f"{os.environ.get('TMPDIR', '/tmp')}/emulated-{os.getpid()}.json"
        torch.multiprocessing.spawn(
            run, (ranks, free_port(), wanted, given.steps, path), nprocs=ranks
        )
        with open(path, encoding="utf-8") as file:
            here = [Found(**entry) for entry in json.load(file)]
        os.unlink(path)
        found += here
        predicted, measured = gain(here)
        late |= abs(predicted / measured - 1) > ALLOWED
        gains.append(
            f"On {ranks} ranks the plan of the skewed model is {measured:.2f} times as fast as "
            f"equal layers, predicted {predicted:.2f}."
        )
        print(gains[-1], file=sys.stderr)
    if given.json:
        rows = [{**asdict(f), "measured_s": f.measured_s, "error": f.error} for f in found]
        print(json.dumps(rows))
    else:
        print("\n".join([HEAD, *map(row, found)]))
    if given.write:
        page = "\n".join([HEAD, *map(row, found), "", *gains])
        write_between_marks(given.write, "emulated.py", page)
    return int(late or any(abs(f.error) > ALLOWED for f in found))


if __name__ == "__main__":
    sys.exit(main())
