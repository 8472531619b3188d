"""Splits written down without a search: equal counts, even times, a given balance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..core.errors import Infeasible, InvalidInput
from ..core.units import format_bytes
from .balance import balance
from .cost import StageCosts
from .schedules import in_flight, too_many_stages

Cuts = tuple[int, ...]
"""Positions of S stages: 0, the first layer of every later stage, and L."""


def cuts_of(counts: Sequence[int]) -> Cuts:
    """Layer counts as positions."""
    return (0, *accumulate(counts))


def equal_layers(num_layers: int, num_stages: int) -> Cuts:
    """Layer counts that differ by at most one, the larger ones in front."""
    each, more = divmod(num_layers, num_stages)
    return cuts_of([each + (stage < more) for stage in range(num_stages)])


def even_times(costs: StageCosts, num_stages: int) -> Cuts:
    """The legal cuts whose slowest stage is fastest, communication and memory left aside.

    Raises:
        InvalidInput: There are not that many stages between the legal cuts.
    """
    positions = (0, *costs.legal_cuts, costs.num_layers)
    work = costs.forward_s + costs.backward_s
    counts = balance([float(work[span]) for span in pairwise(positions)], num_stages)
    return tuple(positions[block] for block in cuts_of(counts))


def check_cuts(costs: StageCosts, cuts: Cuts) -> None:
    """Refuse a split that may not be made or does not fit.

    Raises:
        InvalidInput: The stages do not cover the layers, are more than the schedule takes, or a
            cut is not legal.
        Infeasible: More stages than devices, or a stage exceeds its device's memory.
    """
    layers = costs.profile.layers
    if cuts[-1] != len(layers) or any(first >= last for first, last in pairwise(cuts)):
        counts = [last - first for first, last in pairwise(cuts)]
        raise InvalidInput(
            f"balance {counts} has {sum(counts)} layers; it must have at least one in each stage "
            f"and {len(layers)} in all",
            field="/balance",
        )
    num_stages, options = len(cuts) - 1, costs.options
    refusal = too_many_stages(options.schedule, num_stages, options.num_microbatches)
    if refusal:
        raise InvalidInput(refusal, field="/balance")
    for cut in cuts[1:-1]:
        boundary = costs.profile.boundaries[cut - 1]
        if not boundary.legal:
            raise InvalidInput(
                f"no cut may be made between layers {layers[cut - 1].layer.name!r} and "
                f"{layers[cut].layer.name!r}: {boundary.reason or 'the profile forbids it'}",
                field="/balance",
            )
    if num_stages > len(costs.limits_bytes):
        raise Infeasible(
            f"{num_stages} stages need {num_stages} devices, the cluster has "
            f"{len(costs.limits_bytes)}; use fewer stages or more devices",
            constraint="devices",
            required=num_stages,
            available=len(costs.limits_bytes),
        )
    for stage, (first, last) in enumerate(pairwise(cuts)):
        held = in_flight(options.schedule, stage, num_stages, options.num_microbatches)
        needed, limit = costs.memory(first, last, held).total_bytes, costs.limits_bytes[stage]
        if limit is not None and needed > limit:
            raise Infeasible(
                f"{describe_stage(costs, cuts, stage)} needs {format_bytes(needed)} "
                f"({needed} bytes), device {costs.cluster.devices[stage].name!r} allows "
                f"{format_bytes(limit)} ({limit} bytes)",
                constraint="memory",
                required=needed,
                available=limit,
            )


def describe_stage(costs: StageCosts, cuts: Cuts, stage: int) -> str:
    """For example ``stage 2 (layers 8 to 11, 'h.8' to 'h.11')``."""
    first, last = cuts[stage], cuts[stage + 1] - 1
    names = [costs.profile.layers[index].layer.name for index in (first, last)]
    if first == last:
        return f"stage {stage} (layer {first}, {names[0]!r})"
    return f"stage {stage} (layers {first} to {last}, {names[0]!r} to {names[1]!r})"
