"""Time the planner: uneven transformer-like layers on nodes of eight devices.

    python benchmarks/planner.py --layers 200 --devices 4096 --json

Step time with replicas, recomputation, memory limits and micro-batches, gradient summing
exposed. One plan is made first to have the machine code ready (``cold_s``: that one, compilation
or reading its cache included), then the median of ``--repeats`` plans is reported:

solve_s            a whole plan, from documents to document
first_plan_s       until the first plan that fits was known
what_if_s          planning again with another memory limit, tables reused
gap                of its simulated step against what no plan can reach
search_gap         of the least closed-form step against its bound, which ``--gap`` asks for
peak_memory_bytes  of this process
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput, StagewrightError
from stagewright.core.graph.graph import Boundary, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, SavedStorage, Timing
from stagewright.planner import plan as planning
from stagewright.planner.cost.plan_cost import Decision
from stagewright.planner.plan import Planner
from stagewright.planner.problem.problem import PlanningRequest, Progress
from stagewright.planner.solvers.solve import solve
from stagewright.schedules.numba_jit import is_available

Number = TypeVar("Number", int, float)

DEVICES_PER_NODE = 8

INSIDE = LinkLevel(name="node", group_size=1, latency_s=5e-6, bandwidth_bytes_per_s=200e9)
BETWEEN = LinkLevel(name="network", group_size=1, latency_s=15e-6, bandwidth_bytes_per_s=25e9)

KINDS = (("large", 1.0, 1.0), ("middle", 0.55, 5 / 6), ("small", 0.35, 0.5))
"""Kinds of devices in turn: name, speed, and memory as a share of the one asked for."""


def main() -> int:
    try:
        return _measure(_arguments())
    except StagewrightError as error:
        _say(f"error: {error}")
        return 3 if isinstance(error, Infeasible) else 2


def _measure(arguments: argparse.Namespace) -> int:
    """Plan, print, and say by the exit code whether the gap was met."""
    profile = uneven_profile(arguments.layers, arguments.seed)
    memory_bytes = round(arguments.memory_gb * 1e9)
    options = PlanOptions(
        num_microbatches=arguments.microbatches or 2 * max(arguments.devices, 32),
        max_replicas=None,
        recompute="auto",
        gap=arguments.gap,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
    )
    _say(f"{arguments.layers} layers over {arguments.devices} devices: one plan to warm up")
    rows = []
    cold = _timed(Planner(profile), _cluster(arguments, memory_bytes), options)
    for number in range(arguments.repeats):
        _say(f"plan {number + 1} of {arguments.repeats}, then another memory limit")
        planner = Planner(profile)
        row = _timed(planner, _cluster(arguments, memory_bytes), options)
        other = _cluster(arguments, round(1.1 * memory_bytes))
        row["what_if_s"] = _timed(planner, other, options)["solve_s"]
        rows.append(row)
    result = {
        "layers": arguments.layers,
        "devices": arguments.devices,
        "kinds": arguments.kinds,
        "microbatches": options.num_microbatches,
        "memory_gb": arguments.memory_gb,
        "asked_gap": arguments.gap,
        "numba": is_available(),
        "cold_s": cold["solve_s"],
        **{
            key: statistics.median(row[key] for row in rows)
            for key in ("solve_s", "first_plan_s", "what_if_s", "gap", "search_gap",
                        "step_time_s", "stages")
        },
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:18} {value:.6g}" if isinstance(value, float) else f"{key:18} {value}")
    return 0


def uneven_profile(num_layers: int, seed: int = 0) -> Profile:
    """Layers about like a transformer's block, each up to 40 % off in time, bytes and weights."""
    draw = random.Random(seed)
    layers, boundaries, parameters, storages = [], [], [], []
    for index in range(num_layers):
        forward_s = 2e-3 * draw.uniform(0.6, 1.4)
        weight_bytes = 2 * round(25e6 * draw.uniform(0.6, 1.4))
        layers.append(
            LayerProfile(
                layer=Layer(name=f"layer.{index}"),
                forward=Timing(median_s=forward_s),
                backward=Timing(median_s=2 * forward_s * draw.uniform(0.9, 1.1)),
                workspace_bytes=50_000_000,
            )
        )
        parameters.append(
            Parameter(
                names=(f"layer.{index}.weight",),
                size_bytes=weight_bytes,
                numel=weight_bytes // 2,
                layers=(index,),
            )
        )
        saved_bytes = round(150e6 * draw.uniform(0.6, 1.4))
        storages.append(SavedStorage(size_bytes=saved_bytes, layers=(index,)))
        if index + 1 < num_layers:
            hidden = TensorSpec(
                name="hidden",
                shape=(round(16e6 * draw.uniform(0.5, 1.5)),),
                dtype="uint8",
                requires_grad=True,
            )
            boundaries.append(Boundary(after=index, tensors=(hidden,)))
    return Profile(
        model="Uneven",
        layers=tuple(layers),
        boundaries=tuple(boundaries),
        parameters=tuple(parameters),
        storages=tuple(storages),
    )


def _cluster(arguments: argparse.Namespace, memory_bytes: int) -> Cluster:
    """Nodes of eight devices; of several kinds equally many, one kind behind the other."""
    found = _alike(arguments.devices, memory_bytes)
    each = -(-arguments.devices // arguments.kinds)
    devices = []
    for index, device in enumerate(found.devices):
        kind, speed, share = KINDS[index // each]
        changed = {"kind": kind, "speed": speed, "memory_bytes": round(share * memory_bytes)}
        devices.append(device.model_copy(update=changed if arguments.kinds > 1 else {}))
    return found.model_copy(update={"devices": tuple(devices)})


def _alike(num_devices: int, memory_bytes: int) -> Cluster:
    if num_devices > DEVICES_PER_NODE and num_devices % DEVICES_PER_NODE:
        raise InvalidInput(
            f"{num_devices} devices are no whole nodes of {DEVICES_PER_NODE}; give up to "
            f"{DEVICES_PER_NODE}, or a multiple"
        )
    if num_devices <= DEVICES_PER_NODE:
        return Cluster.of_nodes(
            1, num_devices, inside=INSIDE, between=BETWEEN, memory_bytes=memory_bytes
        )
    return Cluster.of_nodes(
        num_devices // DEVICES_PER_NODE,
        DEVICES_PER_NODE,
        inside=INSIDE,
        between=BETWEEN,
        memory_bytes=memory_bytes,
    )


def _timed(planner: Planner, cluster: Cluster, options: PlanOptions) -> dict[str, float]:
    """One plan and how long it took."""
    found: list[Progress] = []
    gaps: list[float] = []

    def keep_gap(request: PlanningRequest) -> Decision:
        decision = solve(request)
        gaps.append(decision.search_gap)
        return decision

    planning.solve = keep_gap  # the plan itself says the gap of its step alone
    started = time.perf_counter()
    plan: Plan = planner.plan(cluster, options, progress=found.append)
    return {
        "solve_s": time.perf_counter() - started,
        "first_plan_s": found[0].elapsed_s,
        "gap": plan.proof.gap,
        "search_gap": gaps[-1],
        "step_time_s": plan.step_time_s,
        "stages": plan.num_stages,
    }


def _positive(kind: type[Number]) -> Callable[[str], Number]:
    """Numbers above zero."""

    def read(text: str) -> Number:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    read.__name__ = "number"
    return read


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long planning takes.")
    parser.add_argument("--layers", type=_positive(int), default=200)
    parser.add_argument("--devices", type=_positive(int), default=4096)
    parser.add_argument("--microbatches", type=_positive(int), help="default: twice the devices")
    parser.add_argument("--memory-gb", type=_positive(float), default=32.0, help="of each device")
    parser.add_argument("--kinds", type=int, choices=(1, 2, 3), default=1, help="of devices")
    parser.add_argument("--precision", help="recipe of precision; default: the planner's")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--gap", type=float, default=1e-4, help="good enough, relatively")
    parser.add_argument("--repeats", type=_positive(int), default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
