"""Feasibility: does any plan fit, and if not, the closest infeasible plan as an error."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ...core.models.training_memory import training_bytes
from ...core.profile.profile import list_parameters
from ...core.units import count, format_bytes
from ..cost.assignment import Assignment
from ..cost.chain import is_learned
from ..cost.device_classes import Devices, reserved_memory
from ..cost.sharing import list_shared
from ..problem.pin_conflicts import Pins, describe_pins, least_conflict
from ..problem.problem import PlanningRequest, all_parts
from ..search.arcs import Measure, to_assignment
from ..search.branch_and_bound import BranchAndBound, Effort


def infeasible_error(request: PlanningRequest) -> Infeasible:
    """Return the error for a request that no plan fits, about the closest infeasible plan."""
    try:
        closest = find_closest_infeasible(request)
    except DeadlineExceeded:
        return _estimate_error(request)
    if closest is None:
        return _constraint_error(request)
    needed, limit = closest.needed_bytes, closest.limit_bytes
    stages = count(closest.assignment.num_stages, "stage")
    indices = closest.assignment.device_indices(request.devices, closest.stage)
    return Infeasible(
        f"no plan fits the devices' memory: for example in {stages}, "
        f"{_describe_stage(request, closest)} needs {format_bytes(needed)} ({needed} bytes), but "
        f"device {request.cluster.devices[indices[0]].name!r} allows {format_bytes(limit)} "
        f"({limit} bytes){_describe_reserves(request, indices[0])}",
        constraint="memory",
        required=needed,
        available=limit,
    )


def _describe_reserves(request: PlanningRequest, device: int) -> str:
    reserved = reserved_memory(request.cluster.devices[device].memory_bytes, request.options)
    if not reserved.total_bytes:
        return ""
    return f", as {format_bytes(reserved.total_bytes)} are reserved"


def _constraint_error(request: PlanningRequest) -> Infeasible:
    """Return the error if no plan keeps the options, even with unlimited memory."""
    kinds = Counter(device.kind for device in request.cluster.devices)
    has = " and ".join(f"{number} {kind!r}" for kind, number in kinds.items())
    pins = tuple(enumerate(request.options.pins))
    named = least_conflict(pins, lambda some: bool(pins) and not _keeps(request, some))
    cannot = "cannot all be kept" if len(named) > 1 else "cannot be kept"
    what = f"{describe_pins(named)} {cannot}" if named else "no plan keeps the options"
    return Infeasible(
        f"{what} on the cluster's {sum(kinds.values())} devices ({has}), whatever their memory; "
        "relax pins, together, no_cut_after or the number of stages",
        constraint="constraints",
        required=sum(kinds.values()) + 1,
        available=sum(kinds.values()),
    )


def _keeps(request: PlanningRequest, pins: Pins) -> bool:
    """Return False if provably no plan keeps these pins, whatever the memory."""
    options = request.options.model_copy(update={"pins": tuple(pin for _, pin in pins)})
    fewer = replace(request, options=options, deadline=time.monotonic() + LEAST_S)
    try:
        return find_any_plan(fewer, request.devices.change_limits(lambda _: None)) is not None
    # No proof, so these pins must not be blamed.
    except (DeadlineExceeded, InvalidInput, Infeasible):
        return True


def _estimate_error(request: PlanningRequest) -> Infeasible:
    """Return the error with a bound on memory if finding the closest plan takes too long."""
    table = request.costs.stages
    training = training_bytes(request.options.precision, request.options.optimizer)
    resident = table.weights_bytes + table.gradients_bytes + training.of(table.learned_elements)
    resident = resident - list_shared(request.options, table, slice(None)).divided
    single = resident[table.last == table.first + 1]
    whole = int(resident[(table.first == 0) & (table.last == table.num_atoms)].max(initial=0))
    # Some device holds the largest atom, and some device at least an equal share of the whole.
    needed = max(int(single.max()), -(-whole // len(request.cluster.devices)))
    limit = max(entry.limit_bytes or 0 for entry in request.devices.classes)
    return Infeasible(
        f"no plan fits the devices' memory: weights, gradients and optimizer state alone need at "
        f"least {format_bytes(needed)} ({needed} bytes) on some device, activations and buffers "
        f"not included, but the largest device allows {format_bytes(limit)} ({limit} bytes)",
        constraint="memory",
        required=needed,
        available=limit,
    )


def _describe_stage(request: PlanningRequest, found: InfeasiblePlan) -> str:
    """Return, for example, ``stage 0 (layers 0 to 1, 'embed' to 'block.0')``."""
    cuts, layers = found.assignment.cuts, request.profile.layers
    first, last = cuts[found.stage], cuts[found.stage + 1] - 1
    order = found.assignment.order or range(len(layers))
    one, other = layers[order[first]].layer.name, layers[order[last]].layer.name
    if first == last:
        return f"stage {found.stage} (layer {first}, {one!r})"
    return f"stage {found.stage} (layers {first} to {last}, {one!r} to {other!r})"


def find_any_plan(request: PlanningRequest, devices: Devices) -> Assignment | None:
    """Return some plan that fits these devices; `None` if there is none.

    Raises:
        DeadlineExceeded: The search was given up.
    """
    if lacks_memory(request, devices):
        return None
    effort = Effort(request.deadline)
    schedule = request.options.schedule
    measure: Measure = (
        "latency"
        if request.cost_model.only_forward
        else ("gpipe" if schedule == "gpipe" else "1f1b")
    )
    for part in all_parts(request, devices, with_ties=False):
        search = BranchAndBound(part.space, measure, effort)
        path = search.find_first()
        if path is not None:
            return to_assignment(path.arcs, search.space.tables, devices)
    return None


def lacks_memory(request: PlanningRequest, devices: Devices) -> bool:
    """Return True if all devices together allow less than one copy of weights and their states."""
    limits = [(entry.limit_bytes, len(entry.devices)) for entry in devices.classes]
    if any(limit is None for limit, _ in limits):
        return False
    held = [entry for entry in list_parameters(request.profile) if entry.layers]
    needed = sum(entry.size_bytes for entry in held)
    if request.options.objective != "latency":
        learned = [entry for entry in held if is_learned(entry)]
        training = training_bytes(request.options.precision, request.options.optimizer)
        needed += sum(entry.size_bytes + training.of(entry.numel) for entry in learned)
    return needed > sum((limit or 0) * number for limit, number in limits)


LEAST_S = 2.0
"""Time allowed to find the numbers of an error, even past the deadline."""


@dataclass(frozen=True)
class InfeasiblePlan:
    """Plan that would fit if every device allowed ``excess_bytes`` more, but not with less.

    Its ``stage`` lacks most memory. If all devices are equal, no plan needs less on its largest
    one.
    """

    assignment: Assignment
    stage: int
    needed_bytes: int
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.needed_bytes - self.limit_bytes


def find_closest_infeasible(request: PlanningRequest) -> InfeasiblePlan | None:
    """Return the plan that lacks least memory; `None` if one fits, or none with unlimited memory.

    Bisection over bytes added to every limit, between too few and the excess of a plan found.
    """
    request = replace(request, deadline=max(request.deadline, time.monotonic() + LEAST_S))
    best = _measure_excess(
        request, find_any_plan(request, request.devices.change_limits(lambda _: None))
    )
    low = 0
    # Invariant: nothing fits with `low` bytes more (0 at first), and the best plan does with its
    # excess. The difference at least halves each time.
    while best is not None and best.excess_bytes - low > 1:
        middle = (low + best.excess_bytes) // 2
        try:
            found = find_any_plan(request, _add_to_limits(request.devices, middle))
        except DeadlineExceeded:
            break
        if found is None:
            low = middle
        else:
            best = _measure_excess(request, found)
    return best


def _add_to_limits(devices: Devices, added_bytes: int) -> Devices:
    return devices.change_limits(lambda own: None if own is None else own + added_bytes)


def _measure_excess(
    request: PlanningRequest, assignment: Assignment | None
) -> InfeasiblePlan | None:
    if assignment is None:
        return None
    found = [
        InfeasiblePlan(assignment, number, stage.memory.total_bytes, stage.limit_bytes)
        for number, stage in enumerate(request.cost_model.stages(assignment))
        if stage.limit_bytes is not None and stage.memory.total_bytes > stage.limit_bytes
    ]
    return max(found, key=lambda entry: entry.excess_bytes, default=None)
