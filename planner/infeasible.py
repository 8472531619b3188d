"""Why nothing fits, with both numbers."""

from __future__ import annotations

from ..core.errors import Infeasible
from ..core.units import format_bytes
from .misfit import Misfit, closest_misfit
from .request import Request


def out_of_memory(request: Request) -> Infeasible:
    """The error for a request in which no plan fits, about the plan that misses by least."""
    misfit = closest_misfit(request)
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


def _stage(request: Request, misfit: Misfit) -> str:
    """For example ``stage 0 (layers 0 to 1, 'embed' to 'block.0')``."""
    cuts, layers = misfit.assignment.cuts, request.profile.layers
    first, last = cuts[misfit.stage], cuts[misfit.stage + 1] - 1
    order = misfit.assignment.order or range(len(layers))
    one, other = layers[order[first]].layer.name, layers[order[last]].layer.name
    if first == last:
        return f"stage {misfit.stage} (layer {first}, {one!r})"
    return f"stage {misfit.stage} (layers {first} to {last}, {one!r} to {other!r})"
