"""Solvers of ``balance_time`` and ``balance_size``, as in torchgpipe, and of PipeDream's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.errors import Infeasible, InvalidInput
from ...core.units import format_bytes
from ..cost.assignment import Assignment, Cuts, place_in_device_order, place_stages, to_cuts
from ..cost.chain import ChainCosts
from ..cost.plan_cost import Decision
from ..heuristics.candidates import apply_recompute
from ..heuristics.chain_partition import balance
from ..pipedream.objective import pipedream_chain
from ..problem.constraints import broken_option
from ..problem.problem import PlanningRequest
from ..search.device_pool import Floats
from .staged_search import bound_simulated_step


def solve_balance(request: PlanningRequest) -> Decision:
    """Return the plan whose largest stage is least, with stage s on device s, or PipeDream's plan.

    These objectives only choose the cuts: afterwards stages are recomputed as the options say,
    and a plan that does not keep the options is refused.
    """
    objective = request.options.objective
    if request.branches is not None:
        raise InvalidInput(
            f"the objective {objective!r} cuts the profile's own order; plan for 'step_time', or "
            "ask for layer_order 'given'",
            field="/options/layer_order",
        )
    found = _run_pipedream(request) if objective == "pipedream" else _balance(request)
    _check_options(request, found)
    bound = request.cost_model.evaluate(found).value
    found = apply_recompute(request.cost_model, found)
    _check_memory(request, found)
    costed = request.cost_model.evaluate(found)
    if len(request.costs.positions) < len(request.positions):  # only cuts between groups of layers
        bound = _share_s(request) if objective == "balance_time" else 0.0
    elif request.options.recompute == "always":
        bound = costed.value
    return Decision(costed, bound, bound_simulated_step(request, costed))


def _share_s(request: PlanningRequest) -> float:
    """Return a lower bound on the slowest stage: all work shared by all devices."""
    speeds = math.fsum(device.speed for device in request.cluster.devices)
    return float(_work_s(request)[0, -1]) / speeds * (1 - 1e-9)


def _check_options(request: PlanningRequest, found: Assignment) -> None:
    options = request.options
    broken = broken_option(found, request.profile, request.devices, options)
    if broken is not None:
        raise InvalidInput(
            f"the plan of the objective {options.objective!r} {broken.text}; {broken.remedy}, or "
            "plan for 'step_time', which keeps it",
            field=f"/options/{broken.option}",
        )


def _check_memory(request: PlanningRequest, found: Assignment) -> None:
    for number, stage in enumerate(request.cost_model.stages(found)):
        needed = stage.memory.total_bytes
        if stage.limit_bytes is not None and needed > stage.limit_bytes:
            raise Infeasible(
                f"the objective {request.options.objective!r} ignores memory: its stage {number} "
                f"needs {format_bytes(needed)} ({needed} bytes), but its device allows "
                f"{format_bytes(stage.limit_bytes)} ({stage.limit_bytes} bytes)",
                constraint="memory",
                required=needed,
                available=stage.limit_bytes,
            )


def _balance(request: PlanningRequest) -> Assignment:
    """Balance the stages asked for, or as many as devices and cuts allow, stage s on device s."""
    costs, options = request.costs, request.options
    most = min(costs.num_atoms, len(request.cluster.devices))
    if options.max_stages is not None:
        most = min(most, options.max_stages)
    count = options.num_stages or most
    speeds = [device.speed for device in request.cluster.devices[:count]]
    if options.objective == "balance_size":
        cuts = balance_sizes(costs, count)
    elif len(set(speeds)) == 1:
        cuts = to_cuts(balance(np.diagonal(_work_s(request), 1).tolist(), count))
    else:
        cuts = balance_times(_work_s(request), speeds, exactly=bool(options.num_stages))
    found = place_in_device_order(_positions(costs, cuts), request.devices)
    assert found is not None, "no more stages than devices"
    return found


def _work_s(request: PlanningRequest) -> Floats:
    """Return the computing time of every stage at speed 1."""
    costs = request.costs
    again = costs.recompute_s if request.options.recompute == "always" else 0.0
    return costs.forward_s + costs.backward_s + again


def balance_times(work_s: Floats, speeds: Sequence[float], *, exactly: bool) -> Cuts:
    """Return the positions of stages with the fastest slowest stage, stage s on device s.

    Recurrence: ``least[s][j]``, the slowest of s stages that end at position j, is the minimum over
    i of ``max(least[s - 1][i], work[i, j] / speed[s])``; ``least[0][0]`` = 0. O(S N^2). If not
    ``exactly``, a prefix of the devices may suffice.
    """
    n = work_s.shape[0] - 1
    ends = np.arange(n + 1)
    backwards = ends[:, None] >= ends[None, :]
    least = np.where(ends == 0, 0.0, math.inf)
    starts, values = [], []
    for speed in speeds:
        slowest = np.maximum(least[:, None], np.where(backwards, math.inf, work_s / speed))
        starts.append(np.argmin(slowest, axis=0))
        least = np.min(slowest, axis=0)
        values.append(float(least[n]))
    count = len(speeds)
    if not exactly:
        count = min(range(count, 0, -1), key=lambda stages: values[stages - 1])
    # Follow the chosen starts from the last stage to the first.
    cuts = [n]
    for stage in reversed(range(count)):
        cuts.append(int(starts[stage][cuts[-1]]))
    return tuple(reversed(cuts))


def balance_sizes(costs: ChainCosts, num_stages: int) -> Cuts:
    """Return the positions of stages whose largest weights plus activations are least.

    Bisection over the sizes that occur. A stage never shrinks by taking more layers, so greedily
    filled stages are the fewest within a limit. O(S log N log N^2).
    """
    sizes = costs.weights_bytes + costs.saved_bytes
    n = costs.num_atoms
    values = np.unique(sizes[np.triu_indices(n + 1, k=1)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(sizes, int(values[middle]), num_stages)) <= num_stages + 1:
            high = middle
        else:
            low = middle + 1
    cuts = _greedy(sizes, int(values[low]), num_stages)
    while len(cuts) <= num_stages:  # splitting a stage of several atoms makes none larger
        widest = max(range(len(cuts) - 1), key=lambda index: cuts[index + 1] - cuts[index])
        cuts.insert(widest + 1, (cuts[widest] + cuts[widest + 1]) // 2)
    return tuple(cuts)


def _greedy(
    sizes: np.ndarray[tuple[int, ...], np.dtype[np.int64]], limit: int, most: int
) -> list[int]:
    """Fill stages up to the limit; the result is too long if more than ``most`` are needed."""
    n = sizes.shape[0] - 1
    cuts = [0]
    while cuts[-1] < n:
        first = cuts[-1]
        last = int(np.searchsorted(sizes[first, first + 1 :], limit, side="right")) + first
        if last == first or len(cuts) > most:
            return [0] * (n + 2)
        cuts.append(last)
    return cuts


def _positions(costs: ChainCosts, blocks: Sequence[int]) -> Cuts:
    return tuple(costs.positions[block] for block in blocks)


def _run_pipedream(request: PlanningRequest) -> Assignment:
    """Return PipeDream's optimum for the outermost link level, on all devices of one class."""
    costs, devices = request.costs, request.devices
    if len(devices.classes) > 1:
        raise InvalidInput(
            "PipeDream's objective supports equal devices only; plan for 'step_time'",
            field="/options/objective",
        )
    work = costs.forward_s + costs.backward_s
    count = costs.num_atoms
    found = pipedream_chain(
        [float(work[index, index + 1]) for index in range(count)],
        [float(costs.weights_bytes[index, index + 1]) for index in range(count)],
        [float(size) for size in costs.arriving_bytes[1:-1]],
        [len(request.cluster.devices)],
        [devices.levels[-1].bandwidth_bytes_per_s],
    )
    blocks = [0]
    for stage in found.stages:
        blocks.append(blocks[-1] + len(stage.node_ids))
    replicas = [stage.replicas for stage in found.stages]
    chosen = place_stages(_positions(costs, blocks), replicas, devices)
    if chosen is None:
        raise InvalidInput(
            f"PipeDream gives its stages {'-'.join(map(str, replicas))} devices, which cannot be "
            "placed: a stage has to lie inside one group of devices or fill whole groups; plan for "
            "'step_time'",
            field="/options/objective",
        )
    return chosen
