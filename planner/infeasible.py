"""Why nothing fits, with both numbers."""

from __future__ import annotations

from ..core.errors import DeadlineExceeded, Infeasible
from ..core.plan import OPTIMIZER_BYTES_PER_ELEMENT
from ..core.units import format_bytes
from .misfit import Misfit, closest_misfit
from .request import Request


def out_of_memory(request: Request) -> Infeasible:
    """The error for a request in which no plan fits, about the plan that misses by least."""
    try:
        misfit = closest_misfit(request)
    except DeadlineExceeded:
        return _roughly(request)
    if misfit is None:
        return Infeasible(
            "no plan keeps all constraints of the options at once: pins, layers to keep together, "
            "cuts that are forbidden, numbers of stages and replicas; drop one of them",
            constraint="constraints",
            required=1,
            available=0,
        )
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


def _roughly(request: Request) -> Infeasible:
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


def _stage(request: Request, misfit: Misfit) -> str:
    """For example ``stage 0 (layers 0 to 1, 'embed' to 'block.0')``."""
    cuts, layers = misfit.assignment.cuts, request.profile.layers
    first, last = cuts[misfit.stage], cuts[misfit.stage + 1] - 1
    order = misfit.assignment.order or range(len(layers))
    one, other = layers[order[first]].layer.name, layers[order[last]].layer.name
    if first == last:
        return f"stage {misfit.stage} (layer {first}, {one!r})"
    return f"stage {misfit.stage} (layers {first} to {last}, {one!r} to {other!r})"
