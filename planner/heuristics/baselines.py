"""Other splits printed beside a plan, on as many devices of its own; it is not slower than any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.units import format_bytes
from ..cost.assignment import Assignment, placed
from ..cost.device_classes import Devices
from ..cost.plan_cost import Priced
from ..problem.problem import Request
from .candidates import equal_layers, even_times, stage_counts, with_recompute


def baselines(request: Request, chosen: Assignment) -> Iterator[tuple[str, Assignment]]:
    """Splits to compare a plan with, by name; not all of them need be usable.

    Equal layer counts and even times keep the plan's stages, replicas and devices. One stage has
    nothing to cut: then they are pipelines of one device a stage. Of plans of several stages,
    ``data_parallel`` is the whole model on each of their devices, where the options allow so many
    replicas.
    """
    shape = chosen if chosen.num_stages > 1 else one_device_a_stage(request, chosen)
    if shape is not None:
        for name, cuts in (
            ("equal_layers", equal_layers(len(request.profile.layers), shape.num_stages)),
            ("balance_by_time", even_times(request.costs, shape.num_stages)),
        ):
            if cuts is not None:
                other = replace(shape, cuts=cuts)
                yield name, other if shape is chosen else with_recompute(request.pricer, other)
    alone = data_parallel(request, chosen)
    if alone is not None and request.allows(alone):
        yield "data_parallel", alone


def best_of_baselines(request: Request, priced: Priced) -> Priced:
    """The plan, or the fastest of its baselines, theirs, and so on, where that is faster.

    A search that had its time beats them all; one cut short may not.
    """
    while True:
        best = priced
        for _, other in baselines(request, priced.assignment):
            found = request.pricer.priced_if_usable(other) if request.allows(other) else None
            if found is not None and found.step_time_s < best.step_time_s:
                best = found
        if best is priced:
            return priced
        priced = best


def one_device_a_stage(request: Request, chosen: Assignment) -> Assignment | None:
    """As many stages as the plan has devices, or where it has one, as the cluster has.

    `None` where that is no pipeline. The cuts are yet to be chosen.
    """
    found = places(request.devices, chosen)
    if len(found) == 1:
        found = sorted(
            (entry.devices[rank], number, rank)
            for number, entry in enumerate(request.devices.classes)
            for rank in range(len(entry))
        )
    most = min(len(found), max(stage_counts(request.pricer), default=1), request.costs.num_atoms)
    if most < 2:
        return None
    even = even_times(request.costs, most)
    assert even is not None, "there are as many atoms"
    return Assignment(
        cuts=even,
        replicas=(1,) * most,
        classes=tuple(number for _, number, _ in found[:most]),
        ends=tuple(rank + 1 for _, _, rank in found[:most]),
        recompute=(False,) * most,
    )


def data_parallel(request: Request, chosen: Assignment) -> Assignment | None:
    """One stage on as many devices as a plan of several stages has, where they are alike."""
    if chosen.num_stages == 1 or chosen.chunks > 1 or len(set(chosen.classes)) > 1:
        return None
    count = min(sum(chosen.replicas), request.pricer.num_microbatches)
    if count == 1:
        return None
    whole = (0, len(request.profile.layers))
    found = placed(whole, [count], request.devices, class_index=chosen.classes[0])
    return found and with_recompute(request.pricer, found)


def places(devices: Devices, chosen: Assignment) -> list[tuple[int, int, int]]:
    """Each device of a plan once, in pipeline order: its index, class, and rank in the class."""
    found = dict.fromkeys(
        (number, rank)
        for number, end, count in zip(chosen.classes, chosen.ends, chosen.replicas, strict=True)
        for rank in range(end - count, end)
    )
    return [(devices.classes[number].devices[rank], number, rank) for number, rank in found]


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
