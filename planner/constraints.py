"""What the options forbid, as positions and stages that may not be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..core.errors import Infeasible, InvalidInput
from ..core.plan import PlanOptions
from ..core.profile import Profile
from .assignment import Assignment
from .classes import Devices
from .cost import legal_positions, tied_parameters
from .moves import Space
from .schedules import too_many_stages
from .stage_table import StageTable
from .ties import TiePattern, tie_patterns


@dataclass(frozen=True, eq=False)
class Part:
    """A part of all plans that is searched on its own.

    Attributes:
        space: Its plans.
        tied_s: What each of them pays at least for weights in several stages.
    """

    space: Space
    tied_s: float


def allowed_positions(profile: Profile, options: PlanOptions) -> tuple[int, ...]:
    """Layers in front of which a stage may begin, 0 and the number of layers included.

    Raises:
        InvalidInput: A constraint names a layer that the profile does not have.
    """
    index = {entry.layer.name: position for position, entry in enumerate(profile.layers)}
    forbidden: set[int] = set()
    for name in options.no_cut_after:
        forbidden.add(_layer(index, name, "no_cut_after") + 1)
    joined = [
        (_layer(index, one, "together"), _layer(index, other, "together"))
        for one, other in options.together
    ]
    if options.tied == "together":
        joined += [(entry.layers[0], entry.layers[-1]) for entry in tied_parameters(profile)]
    for one, other in joined:
        forbidden.update(range(min(one, other) + 1, max(one, other) + 1))
    last = len(profile.layers)
    return tuple(
        position
        for position in legal_positions(profile)
        if position in (0, last) or position not in forbidden
    )


def parts(
    tables: StageTable, devices: Devices, options: PlanOptions, *, with_ties: bool = True
) -> Iterator[Part]:
    """All plans the options allow, in parts.

    One part for each way to spread tied weights over stages, and where layers are pinned to
    stages, for each number of stages.

    Raises:
        InvalidInput: A pin names a layer the profile does not have.
    """
    index = {entry.layer.name: position for position, entry in enumerate(tables.profile.layers)}
    pinned = [(pin, _layer(index, pin.layer, "pins")) for pin in options.pins]
    allowed = None
    if any(pin.kind is not None for pin, _ in pinned):
        allowed = np.ones((len(devices.classes), len(tables.first)), dtype=np.bool_)
        for pin, layer in pinned:
            if pin.kind is not None:
                inside = tables.holds(layer)
                for number, entry in enumerate(devices.classes):
                    if entry.kind != pin.kind:
                        allowed[number] &= ~inside
    stage_pins = [(pin.stage, layer) for pin, layer in pinned if pin.stage is not None]
    whole = Space(tables, devices, options, allowed=allowed)
    counts: list[int | None] = [None]
    if stage_pins:
        most = min(tables.most_stages, len(devices.cluster.devices))
        counts = [options.num_stages] if options.num_stages else [*range(1, most + 1)]
    untold = [TiePattern((), (), 0.0)]
    patterns = _patterns(tables, devices, options) if with_ties else untold
    for count in counts:
        space = whole if count is None else _pinned(whole, stage_pins, count)
        if space is None:
            continue
        for pattern in patterns:
            yield Part(_of_pattern(space, pattern), pattern.least_sync_s)


def _patterns(tables: StageTable, devices: Devices, options: PlanOptions) -> list[TiePattern]:
    if options.objective in ("latency", "throughput") or not tables.tied:
        return [TiePattern((), (), 0.0)]
    return tie_patterns(tables, devices)


def _of_pattern(space: Space, pattern: TiePattern) -> Space:
    if not pattern.together and not pattern.apart:
        return space
    mask = pattern.allows(space.tables)
    return replace(space, only=mask if space.only is None else space.only & mask)


def _pinned(space: Space, stage_pins: list[tuple[int, int]], num_stages: int) -> Space | None:
    """The plans of so many stages that keep the pins; `None` if a pin is beyond the last one."""
    number = np.zeros(len(space.tables.first), dtype=np.int64)
    only = np.ones_like(number, dtype=np.bool_)
    for stage, layer in stage_pins:
        from_end = num_stages - stage
        if from_end < 1:
            return None
        inside = space.tables.holds(layer)
        only &= ~(inside & (number > 0) & (number != from_end))
        number[inside] = from_end
    options = space.options.model_copy(update={"num_stages": num_stages})
    if space.options.max_stages is not None and num_stages > space.options.max_stages:
        return None
    return replace(space, options=options, only=only, stage_number=number)


def keeps_constraints(
    assignment: Assignment, profile: Profile, positions: tuple[int, ...], devices: Devices,
    options: PlanOptions,
) -> bool:  # fmt: skip
    """Whether a plan from elsewhere has only allowed cuts and counts, and keeps the pins."""
    num_stages = assignment.num_stages
    if not set(assignment.cuts) <= set(positions):
        return False
    if options.num_stages not in (None, num_stages):
        return False
    if options.max_stages is not None and num_stages > options.max_stages:
        return False
    most = 1 if options.objective == "latency" else options.num_microbatches
    if max(assignment.replicas) > min(most, options.max_replicas or most):
        return False
    if not options.pins:
        return True
    index = {entry.layer.name: position for position, entry in enumerate(profile.layers)}
    for pin in options.pins:
        stage = bisect_right(assignment.cuts, index[pin.layer]) - 1
        if pin.stage not in (None, stage):
            return False
        if pin.kind not in (None, devices.classes[assignment.classes[stage]].kind):
            return False
    return True


def check_counts(num_atoms: int, devices: Devices, options: PlanOptions) -> None:
    """Refuse numbers of stages that nothing can have.

    Raises:
        InvalidInput: More 1F1B stages are asked for than micro-batches.
        Infeasible: More stages are asked for than devices or cuts allow.
    """
    wanted = options.num_stages
    if wanted is None:
        return
    if options.objective != "latency":
        refusal = too_many_stages(options.schedule, wanted, options.num_microbatches)
        if refusal:
            raise InvalidInput(refusal, field="/options/num_stages")
    available, chunks = len(devices.cluster.devices), _chunks(options)
    needed = -(-wanted // chunks)
    if needed > available:
        each = "" if chunks == 1 else f", {chunks} on each,"
        raise Infeasible(
            f"{wanted} stages{each} need {needed} devices, the cluster has {available}; "
            "ask for fewer stages or add devices",
            constraint="devices",
            required=needed,
            available=available,
        )
    if wanted > num_atoms:
        raise Infeasible(
            f"the layers can be cut into at most {num_atoms} stages ({num_atoms - 1} cuts are "
            f"allowed), not {wanted}; ask for fewer stages",
            constraint="legal_cuts",
            required=wanted,
            available=num_atoms,
        )


def _chunks(options: PlanOptions) -> int:
    return {"zbv": 2, "interleaved_1f1b": options.chunks, "looped_bfs": options.chunks,
            "interleaved_zero_bubble": options.chunks}.get(options.schedule, 1)  # fmt: skip


def _layer(index: dict[str, int], name: str, field: str) -> int:
    if name not in index:
        raise InvalidInput(
            f"{field} names layer {name!r}, which the profile does not have",
            field=f"/options/{field}",
        )
    return index[name]
