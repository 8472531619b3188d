"""Requests a second with 1, 2, 4 and 8 in flight, beside what the simulator says.

Stages sleep instead of computing, so that what is left is the pipeline: its threads, its messages,
its waiting. Two stages, balanced and not, in one process and over several, and a slow stage on two
replicas. Exits 1 when a rate is further than 5 % from the simulated one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from stagewright import DistributedInferencePipeline, InferencePipeline
from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.profiler.links.launch_local import free_port
from stagewright.schedules.make_schedule import make_schedule

ALLOWED = 0.05
WIDTH = 8
IN_FLIGHT = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """Configuration of a serving run.

    Attributes:
        name: For the table.
        forward_s: Of each stage.
        replicas: Of each stage.
    """

    name: str
    forward_s: tuple[float, ...]
    replicas: tuple[int, ...]

    def simulated_per_s(self, in_flight: int) -> float:
        """Return requests a second, once the pipeline is full.

        The simulator gives the time of one request, and of a long stream of them without a limit;
        with n under way there are at most n every so many seconds as one takes.
        """
        alone_s = self._stream_s(1)
        few, many = 64, 128
        steady_s = (self._stream_s(many) - self._stream_s(few)) / (many - few)
        return min(in_flight / alone_s, 1 / steady_s)

    def _stream_s(self, requests: int) -> float:
        schedule = make_schedule(
            "forward_only", len(self.forward_s), requests, replicas=self.replicas
        )
        nothing = (0.0,) * len(self.forward_s)
        times = StageTimes(forward_s=self.forward_s, backward_s=nothing)
        return simulate(schedule, times, with_events=False).step_time_s


@dataclass(frozen=True)
class Found:
    """Of one setting, one place and one number in flight.

    Attributes:
        latency_s: Median time of a request from `submit` to its result.
    """

    name: str
    where: str
    in_flight: int
    requests_per_s: float
    simulated_per_s: float
    latency_s: float

    @property
    def error(self) -> float:
        """Of the simulation, relative to what was measured."""
        return self.simulated_per_s / self.requests_per_s - 1


def settings(forward_s: float) -> list[Setting]:
    """Two stages that take three forwards together; the last with two devices for the slow one."""
    return [
        Setting("even", (forward_s, forward_s), (1, 1)),
        Setting("uneven", (forward_s / 2, forward_s * 3 / 2), (1, 1)),
        Setting("uneven, slow stage twice", (forward_s / 2, forward_s * 3 / 2), (1, 2)),
    ]


def model_and_plan(setting: Setting) -> tuple[nn.Module, Plan]:
    """Return a layer a stage; the work is what `slow_down` adds."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in setting.forward_s])
    captured = trace(model, torch.zeros(1, WIDTH), check=False)
    graph = captured.graph
    profile = Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=Timing(median_s=time_s), backward=Timing(median_s=0))
            for layer, time_s in zip(graph.layers, setting.forward_s, strict=True)
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
    )
    plan = plan_from_balance(
        profile,
        Cluster.uniform(sum(setting.replicas)),
        PlanOptions(num_microbatches=4, schedule="gpipe"),
        [1] * len(setting.forward_s),
        replicas=setting.replicas if max(setting.replicas) > 1 else (),
    )
    return model, plan


def slow_down(stage: nn.Module, forward_s: float) -> None:
    """Have a stage take its time and no core."""

    def wait(module: nn.Module, inputs: Any) -> None:
        time.sleep(forward_s)

    stage.register_forward_pre_hook(wait)


def measure(
    pipeline: InferencePipeline | DistributedInferencePipeline, requests: int, in_flight: int
) -> tuple[float, float]:
    """Return requests a second and median latency once the pipeline is full."""
    begun: list[float] = []
    ended: list[float] = []

    def stream() -> Any:
        for _ in range(in_flight + requests):
            begun.append(time.perf_counter())
            yield torch.zeros(1, WIDTH)

    for _ in pipeline.map(stream()):
        ended.append(time.perf_counter())
    through_s = ended[-1] - ended[in_flight - 1]
    latencies = [end - begin for begin, end in zip(begun, ended, strict=True)][in_flight:]
    return requests / through_s, statistics.median(latencies)


def in_one_process(setting: Setting, in_flight: int, requests: int) -> tuple[float, float]:
    model, plan = model_and_plan(setting)
    devices = ["cpu"] * sum(setting.replicas)
    with InferencePipeline(model, plan, devices=devices, max_in_flight=in_flight) as pipeline:
        for stages, forward_s in zip(pipeline.stages, setting.forward_s, strict=True):
            for stage in stages:
                slow_down(stage, forward_s)
        return measure(pipeline, requests, in_flight)


def serve(rank: int, ranks: int, port: int, setting: Setting, requests: int, path: str) -> None:
    """One of several processes; rank 0 writes what was found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {}
    for in_flight in IN_FLIGHT:
        model, plan = model_and_plan(setting)
        pipeline = DistributedInferencePipeline(model, plan, max_in_flight=in_flight)
        with pipeline:
            for index, stage in pipeline.stages.items():
                slow_down(stage, setting.forward_s[index])
            if rank == 0:
                found[in_flight] = measure(pipeline, requests, in_flight)
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def over_processes(setting: Setting, requests: int) -> dict[int, tuple[float, float]]:
    ranks = sum(setting.replicas)
    path = f"{os.environ.get('TMPDIR', '/tmp')}/inference-{os.getpid()}.json"
    with ExitStack() as stack:
        stack.callback(lambda: os.path.exists(path) and os.unlink(path))
        torch.multiprocessing.spawn(
            serve, (ranks, free_port(), setting, requests, path), nprocs=ranks
        )
        with open(path, encoding="utf-8") as file:
            return {int(key): tuple(value) for key, value in json.load(file).items()}


HEAD = """| stages | where | in flight | requests/s | simulated | off by | latency, median |
|---|---|---|---|---|---|---|"""


def row(found: Found) -> str:
    return (
        f"| {found.name} | {found.where} | {found.in_flight} | {found.requests_per_s:.1f} | "
        f"{found.simulated_per_s:.1f} | {found.error:+.1%} | {found.latency_s * 1e3:.1f} ms |"
    )


def run(wanted: Sequence[Setting], requests: int, where: Sequence[str]) -> list[Found]:
    """All settings, each place and number in flight; rows to stderr as they come."""
    found = []
    for setting in wanted:
        for place in where:
            rates = (
                over_processes(setting, requests)
                if place == "processes"
                else {n: in_one_process(setting, n, requests) for n in IN_FLIGHT}
            )
            for in_flight, (per_s, latency_s) in rates.items():
                simulated = setting.simulated_per_s(in_flight)
                found.append(Found(setting.name, place, in_flight, per_s, simulated, latency_s))
                print(row(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward-ms", type=float, default=50.0, help="mean of the two stages")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument(
        "--where", nargs="+", choices=["threads", "processes"], default=["threads", "processes"]
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = run(settings(given.forward_ms / 1e3), given.requests, given.where)
    if given.json:
        print(json.dumps([{**asdict(each), "error": each.error} for each in found]))
    else:
        print("\n".join([HEAD, *map(row, found)]))
    return int(any(abs(each.error) > ALLOWED for each in found))


if __name__ == "__main__":
    sys.exit(main())
