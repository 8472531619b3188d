"""Why a split somebody else would choose cannot be used, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.units import format_bytes
from ..cost.assignment import Assignment
from ..problem.problem import Request


def refusal(request: Request, assignment: Assignment) -> str:
    """The first reason in words; empty if it can be used."""
    return next(_refusals(request, assignment), "")


def _refusals(request: Request, assignment: Assignment) -> Iterator[str]:
    yield from _wrong_cuts(request, assignment.cuts)
    if not request.allows(assignment):
        yield "the options ask for other stages, replicas or pins"
    try:
        yield from _too_large(request, assignment)
        request.pricer.price(assignment)  # a step is simulated, so it comes last
    except InvalidInput as error:
        yield str(error)


def _too_large(request: Request, assignment: Assignment) -> Iterator[str]:
    """Stages that exceed what their devices allow."""
    stages = request.pricer.stages(assignment)
    held = request.pricer.held_bytes(stages, assignment)
    for number, (stage, needed) in enumerate(zip(stages, held, strict=True)):
        if stage.limit_bytes is not None and needed > stage.limit_bytes:
            index = assignment.device_indices(request.devices, number)[0]
            yield (
                f"stage {number} needs {_bytes(needed)}, device "
                f"{request.cluster.devices[index].name!r} allows {_bytes(stage.limit_bytes)}"
            )


def _wrong_cuts(request: Request, cuts: tuple[int, ...]) -> Iterator[str]:
    profile, allowed = request.profile, set(request.positions)
    if any(first >= last for first, last in pairwise(cuts)):
        yield "it leaves a stage empty"
    for cut in cuts[1:-1]:
        if cut not in allowed:
            name = profile.layers[cut - 1].layer.name
            boundary = profile.boundaries[cut - 1]
            reason = "the options forbid it"
            if not boundary.legal:
                reason = boundary.reason or "the profile forbids it"
            yield f"no cut may be made behind layer {name!r}: {reason}"


def _bytes(size_bytes: int) -> str:
    """Both rounded and exact, as two sizes that differ may look the same rounded."""
    return f"{format_bytes(size_bytes)} ({size_bytes} bytes)"
