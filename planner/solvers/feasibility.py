"""Why nothing fits, with both numbers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ...core.plan.plan import OPTIMIZER_BYTES_PER_ELEMENT
from ...core.units import format_bytes
from ..cost.assignment import Assignment
from ..cost.device_classes import Devices
from ..problem.pin_conflicts import Pins, describe_pins, least_conflict
from ..problem.problem import PlanningRequest, all_parts
from ..search.arcs import Measure, to_assignment
from ..search.branch_and_bound import BranchAndBound, Effort


def out_of_memory(request: PlanningRequest) -> Infeasible:
    """The error for a request in which no plan fits, about the plan that misses by least."""
    try:
        misfit = closest_misfit(request)
    except DeadlineExceeded:
        return _roughly(request)
    if misfit is None:
        return _unkept(request)
    needed, limit = misfit.needed_bytes, misfit.limit_bytes
    count = misfit.assignment.num_stages
    indices = misfit.assignment.device_indices(request.devices, misfit.stage)
    return Infeasible(
        f"no plan fits the devices' memory: in the one that misses by least ({count} "
        f"stage{'s' * (count > 1)}), {_stage(request, misfit)} needs {format_bytes(needed)} "
        f"({needed} bytes) and device {request.cluster.devices[indices[0]].name!r} allows "
        f"{format_bytes(limit)} ({limit} bytes)",
        constraint="memory",
        required=needed,
        available=limit,
    )


def _unkept(request: PlanningRequest) -> Infeasible:
    """The error where no plan keeps the options, even with all the memory one could want."""
    kinds = Counter(device.kind for device in request.cluster.devices)
    has = " and ".join(f"{count} {kind!r}" for kind, count in kinds.items())
    pins = tuple(enumerate(request.options.pins))
    named = least_conflict(pins, lambda some: bool(pins) and not _keeps(request, some))
    what = f"{describe_pins(named)} cannot all be kept" if named else "no plan keeps the options"
    return Infeasible(
        f"{what} on the cluster's {sum(kinds.values())} devices ({has}), whatever their memory; "
        "add devices, or ask for less: pins, layers together, forbidden cuts, numbers of stages",
        constraint="constraints",
        required=sum(kinds.values()) + 1,
        available=sum(kinds.values()),
    )


def _keeps(request: PlanningRequest, pins: Pins) -> bool:
    """Whether some plan keeps these pins, whatever the memory."""
    options = request.options.model_copy(update={"pins": tuple(pin for _, pin in pins)})
    fewer = replace(request, options=options, deadline=time.monotonic() + LEAST_S)
    try:
        return any_plan(fewer, without_limits(request.devices)) is not None
    except (DeadlineExceeded, InvalidInput, Infeasible):
        return True


def _roughly(request: PlanningRequest) -> Infeasible:
    """The error where finding the closest plan would take too long: a bound instead of a plan."""
    table = request.costs.stages
    state = OPTIMIZER_BYTES_PER_ELEMENT[request.options.optimizer]
    resident = table.weights_bytes + table.gradients_bytes + state * table.learned_elements
    single = resident[table.last == table.first + 1]
    whole = int(resident[(table.first == 0) & (table.last == table.num_atoms)].max(initial=0))
    needed = max(int(single.max()), -(-whole // len(request.cluster.devices)))
    limit = max(entry.limit_bytes or 0 for entry in request.devices.classes)
    return Infeasible(
        f"no plan fits the devices' memory: weights, gradients and optimizer state alone need at "
        f"least {format_bytes(needed)} ({needed} bytes) on some device, activations and buffers "
        f"come on top, and the largest device allows {format_bytes(limit)} ({limit} bytes)",
        constraint="memory",
        required=needed,
        available=limit,
    )


def _stage(request: PlanningRequest, misfit: Misfit) -> str:
    """For example ``stage 0 (layers 0 to 1, 'embed' to 'block.0')``."""
    cuts, layers = misfit.assignment.cuts, request.profile.layers
    first, last = cuts[misfit.stage], cuts[misfit.stage + 1] - 1
    order = misfit.assignment.order or range(len(layers))
    one, other = layers[order[first]].layer.name, layers[order[last]].layer.name
    if first == last:
        return f"stage {misfit.stage} (layer {first}, {one!r})"
    return f"stage {misfit.stage} (layers {first} to {last}, {one!r} to {other!r})"


def any_plan(request: PlanningRequest, devices: Devices) -> Assignment | None:
    """Some plan that fits these devices.

    Raises:
        DeadlineExceeded: The search was given up.
    """
    effort = Effort(request.deadline)
    schedule = request.options.schedule
    measure: Measure = (
        "latency" if request.pricer.only_forward else ("gpipe" if schedule == "gpipe" else "1f1b")
    )
    for part in all_parts(request, devices, with_ties=False):
        search = BranchAndBound(part.space, measure, effort)
        path = search.find_first()
        if path is not None:
            return to_assignment(path.arcs, search.space.tables, devices)
    return None


LEAST_S = 2.0
"""Time there is to find the numbers of an error, whatever the deadline was."""


@dataclass(frozen=True)
class Misfit:
    """A plan that would fit if every device allowed ``needed - limit`` bytes more, and no less.

    Attributes:
        stage: Its stage that lacks most.
        needed_bytes: On each of that stage's devices; where all devices are equal, no plan needs
            less on its largest one.
        limit_bytes: What such a device allows.
    """

    assignment: Assignment
    stage: int
    needed_bytes: int
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.needed_bytes - self.limit_bytes


def closest_misfit(request: PlanningRequest) -> Misfit | None:
    """Of all plans the one that lacks least; `None` if none would fit any limits, or one fits.

    Bisection over bytes added to every limit, between too few and what a plan found lacks.
    """
    request = replace(request, deadline=max(request.deadline, time.monotonic() + LEAST_S))
    best = _misfit(request, any_plan(request, without_limits(request.devices)))
    low = 0
    while best is not None and best.excess_bytes - low > 1:
        middle = (low + best.excess_bytes) // 2
        try:
            found = any_plan(request, _with_limits(request.devices, middle))
        except DeadlineExceeded:
            break
        if found is None:
            low = middle
        else:
            best = _misfit(request, found)
    return best


def without_limits(devices: Devices) -> Devices:
    """The same with all the memory one could want."""
    return _with_limits(devices, None)


def _with_limits(devices: Devices, added_bytes: int | None) -> Devices:
    """The same with so much more on every device that has a limit; `None` for no limits."""
    classes = tuple(
        replace(
            entry,
            limit_bytes=None
            if entry.limit_bytes is None or added_bytes is None
            else entry.limit_bytes + added_bytes,
        )
        for entry in devices.classes
    )
    return Devices(devices.cluster, classes)


def _misfit(request: PlanningRequest, assignment: Assignment | None) -> Misfit | None:
    if assignment is None:
        return None
    misfits = [
        Misfit(assignment, number, stage.memory.total_bytes, stage.limit_bytes)
        for number, stage in enumerate(request.pricer.stages(assignment))
        if stage.limit_bytes is not None and stage.memory.total_bytes > stage.limit_bytes
    ]
    return max(misfits, key=lambda misfit: misfit.excess_bytes, default=None)
