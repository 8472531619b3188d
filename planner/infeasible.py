"""Why nothing fits, with both numbers."""

from __future__ import annotations

from ..core.errors import Infeasible
from ..core.units import format_bytes
from .least_memory import least_memory_bytes
from .request import Request


def out_of_memory(request: Request) -> Infeasible:
    """The error for a request in which no plan fits."""
    limits = [entry.limit_bytes for entry in request.devices.classes]
    needed = least_memory_bytes(request)
    known = [limit for limit in limits if limit is not None]
    if needed is None or not known:
        return Infeasible(
            "no plan keeps all constraints of the options at once: pins, layers to keep together, "
            "cuts that are forbidden, numbers of stages and replicas; drop one of them",
            constraint="constraints",
            required=1,
            available=0,
        )
    available = max(known)
    return Infeasible(
        f"no plan fits the devices' memory: whatever is chosen, some device needs at least "
        f"{format_bytes(needed)} ({needed} bytes), and the largest allows "
        f"{format_bytes(available)} ({available} bytes)",
        constraint="memory",
        required=needed,
        available=available,
    )
