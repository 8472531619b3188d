"""Constraints of the options, turned into allowed positions and stages of the search."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...core.errors import Infeasible, InvalidInput
from ...core.plan.plan import PlanOptions
from ...core.profile.block_stack import find_profile_stack, find_stacks
from ...core.profile.profile import Profile
from ..cost.assignment import Assignment
from ..cost.chain import StageTable, legal_positions, tied_parameters
from ..cost.device_classes import Devices
from ..search.arcs import SearchSpace
from .input_checks import count_chunks
from .pin_conflicts import check_pins, describe_pins
from .regular import find_irregularity, get_rule, list_equal_cuts, regular_spaces
from .tied_weights import TiePattern, tie_patterns


@dataclass(frozen=True, eq=False)
class SearchPart:
    """Subset of all plans that is searched by itself.

    Each of its plans spends at least ``tied_s`` on tied weights.
    """

    space: SearchSpace
    tied_s: float


def limit_to_state(profile: Profile, options: PlanOptions) -> tuple[PlanOptions, str]:
    """Return options without replicas and recomputation if a layer keeps state, and a note.

    Replicas would each count their own micro-batches, and a recomputation would count one twice.

    Raises:
        InvalidInput: The options ask to recompute every stage.
    """
    layer = next((entry.layer for entry in profile.layers if entry.layer.stateful), None)
    if layer is None or options.objective == "latency":
        return options, ""
    why = f"layer {layer.name!r} changes {layer.stateful!r} in every call and keeps it"
    if options.recompute == "always":
        raise InvalidInput(
            f"{why}, so it cannot run twice for one micro-batch; choose recompute='never', or "
            "keep that state out of the model",
            field="/options/recompute",
        )
    if options.max_replicas == 1 and options.recompute == "never":
        return options, ""
    limited = options.model_copy(update={"max_replicas": 1, "recompute": "never"})
    return limited, f"planned without replicas and recomputation: {why}"


def allowed_positions(profile: Profile, options: PlanOptions) -> tuple[int, ...]:
    """Return the layers in front of which a stage may begin, and the number of layers."""
    index = {entry.layer.name: position for position, entry in enumerate(profile.layers)}
    forbidden = set(cuts_in_blocks(profile, options))
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


def cuts_in_blocks(profile: Profile, options: PlanOptions) -> Iterator[int]:
    """Yield the layers in front of which no stage may begin where the options cut at blocks.

    Raises:
        InvalidInput: The model has no blocks.
    """
    if options.cut_at == "layers" and get_rule(options) != "equal_blocks":
        return
    names = [entry.layer.name for entry in profile.layers]
    option, value = ("cut_at", "blocks")
    try:
        if get_rule(options) == "equal_blocks":
            option, value = "regular", "equal_blocks"
            allowed = set(find_profile_stack(profile).starts[1:])
        else:
            allowed = {cut for stack in find_stacks(names) for cut in stack.cuts}
    except InvalidInput as error:
        raise InvalidInput(
            f"{option}={value!r} does not apply to this model: {error}; leave {option} at its "
            "default",
            field=f"/options/{option}",
        ) from None
    yield from (cut for cut in range(1, len(names)) if cut not in allowed)


def search_parts(
    tables: StageTable, devices: Devices, options: PlanOptions, *, with_ties: bool = True
) -> Iterator[SearchPart]:
    """Yield all plans that the options allow, one part for each way to spread tied weights."""
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
    whole = SearchSpace(tables, devices, options, allowed=allowed)
    if stage_pins:
        whole = _keep_stage_pins(whole, stage_pins)
    # Neither latency nor throughput pays for tied weights.
    has_ties = with_ties and tables.tied and options.objective not in ("latency", "throughput")
    patterns = tie_patterns(tables, devices) if has_ties else [TiePattern((), (), 0.0)]
    for pattern in patterns:
        space = whole
        if pattern.together or pattern.apart:
            mask = pattern.allows(tables)
            space = replace(whole, only=mask if whole.only is None else whole.only & mask)
        for regular in regular_spaces(space):
            yield SearchPart(regular, pattern.least_sync_s)


def _keep_stage_pins(space: SearchSpace, stage_pins: list[tuple[int, int]]) -> SearchSpace:
    # Stages that hold a pinned layer get that number plus one; those with two numbers are dropped.
    number = np.zeros(len(space.tables.first), dtype=np.int64)
    only = np.ones_like(number, dtype=np.bool_)
    for stage, layer in stage_pins:
        inside = space.tables.holds(layer)
        only &= ~(inside & (number > 0) & (number != stage + 1))
        number[inside] = stage + 1
    return replace(space, only=only, stage_number=number)


def keeps_constraints(
    assignment: Assignment, profile: Profile, positions: tuple[int, ...], devices: Devices,
    options: PlanOptions,
) -> bool:  # fmt: skip
    """Return True if a plan from outside the search keeps cuts, counts and pins."""
    if not set(assignment.cuts) <= set(positions):
        return False
    return broken_option(assignment, profile, devices, options) is None


@dataclass(frozen=True)
class BrokenOption:
    """An option that a plan does not keep.

    The text, the predicate of a sentence, says what the plan does and what the option asks for; the
    remedy is a clause.
    """

    option: str
    text: str
    remedy: str


def broken_option(
    assignment: Assignment, profile: Profile, devices: Devices, options: PlanOptions
) -> BrokenOption | None:
    """Return the first limit or pin in the options that a plan does not keep."""
    num_stages, replicas = assignment.num_stages, max(assignment.replicas)
    only_forward = options.objective == "latency"
    if options.num_stages not in (None, num_stages):
        text = f"has {num_stages} stages, not num_stages={options.num_stages}"
        return BrokenOption("num_stages", text, f"leave it out or ask for {num_stages}")
    if options.max_stages is not None and num_stages > options.max_stages:
        text = f"has {num_stages} stages, more than max_stages={options.max_stages}"
        return BrokenOption("max_stages", text, f"leave it out or ask for {num_stages} or more")
    if replicas > (1 if only_forward else options.num_microbatches):
        text = (
            f"has {replicas} replicas of a stage, more than "
            f"num_microbatches={options.num_microbatches}"
        )
        return BrokenOption("num_microbatches", text, f"ask for {replicas} or more")
    if options.max_replicas is not None and replicas > options.max_replicas:
        text = f"has {replicas} replicas of a stage, more than max_replicas={options.max_replicas}"
        return BrokenOption("max_replicas", text, f"allow any number or {replicas}")
    irregular = find_irregularity(assignment, profile, options)
    if irregular:
        text = f"{irregular} (regular={options.regular!r})"
        return BrokenOption("regular", text, "leave it out")
    return _broken_pin(assignment, profile, devices, options)


def _broken_pin(
    assignment: Assignment, profile: Profile, devices: Devices, options: PlanOptions
) -> BrokenOption | None:
    if not options.pins:
        return None
    index = {entry.layer.name: position for position, entry in enumerate(profile.layers)}
    for entry in enumerate(options.pins):
        pin = entry[1]
        stage = bisect_right(assignment.cuts, _layer(index, pin.layer, "pins")) - 1
        kind = devices.classes[assignment.classes[stage]].kind
        if pin.stage not in (None, stage) or pin.kind not in (None, kind):
            where = f"has {pin.layer!r} in stage {stage} on a {kind!r}"
            text = f"{where}, contrary to {describe_pins([entry])}"
            return BrokenOption("pins", text, "drop the pin")
    return None


def check_asked(
    profile: Profile, positions: tuple[int, ...], devices: Devices, options: PlanOptions,
    num_nodes: int | None,
) -> None:  # fmt: skip
    """Refuse numbers of stages and pins that no plan can satisfy, whatever the memory.

    Where layers may be reordered, ``num_nodes`` counts the nodes of the layer graph.
    """
    index = {entry.layer.name: position for position, entry in enumerate(profile.layers)}
    if options.pins:
        check_pins(
            options,
            lambda name: _layer(index, name, "pins"),
            [device.kind for device in devices.cluster.devices],
        )
    most = len(devices.cluster.devices) * count_chunks(options)
    if get_rule(options) == "equal_blocks" and not any(list_equal_cuts(profile, options, most)):
        wanted = options.num_stages or options.max_stages
        raise Infeasible(
            f"{find_profile_stack(profile).num_blocks} blocks cannot be cut into stages of equally "
            f"many with {wanted} stages on {len(devices.cluster.devices)} devices; set another "
            "num_stages",
            constraint="stages",
            required=wanted,
            available=most,
        )
    _check_num_stages(num_nodes or len(positions) - 1, devices, options)
    _check_pinned_stages(devices, options)


def _check_pinned_stages(devices: Devices, options: PlanOptions) -> None:
    available, chunks = len(devices.cluster.devices), count_chunks(options)
    for entry in enumerate(options.pins):
        needed = -(-((entry[1].stage or 0) + 1) // chunks)
        if needed > available:
            raise Infeasible(
                f"{describe_pins([entry])} needs {needed} devices, but the cluster has "
                f"{available}; pin it to a lower stage or add devices",
                constraint="devices",
                required=needed,
                available=available,
            )


def _check_num_stages(num_atoms: int, devices: Devices, options: PlanOptions) -> None:
    wanted = options.num_stages
    if wanted is None:
        return
    available, chunks = len(devices.cluster.devices), count_chunks(options)
    needed = -(-wanted // chunks)
    if needed > available:
        each = "" if chunks == 1 else f", {chunks} on each,"
        raise Infeasible(
            f"{wanted} stages{each} need {needed} devices, but the cluster has {available}; "
            "ask for fewer stages or add devices",
            constraint="devices",
            required=needed,
            available=available,
        )
    if wanted > num_atoms:
        raise Infeasible(
            f"the layers can be cut into at most {num_atoms} stages ({num_atoms - 1} legal cuts), "
            f"not {wanted}; ask for fewer stages",
            constraint="legal_cuts",
            required=wanted,
            available=num_atoms,
        )


def _layer(index: dict[str, int], name: str, field: str) -> int:
    if name not in index:
        raise InvalidInput(
            f"{field} names layer {name!r}, which the profile does not have",
            field=f"/options/{field}",
        )
    return index[name]
