"""Regular plans as a rule: grids of stages and replicas, and equally many blocks a stage.

Among plans of one number of replicas (and, where blocks are counted, of one number of stages)
the search has nothing left to vary but cuts, so each such number is a space of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ...core.plan.plan import PlanOptions
from ...core.profile.block_stack import find_profile_stack
from ...core.profile.profile import Profile
from ..cost.assignment import Assignment
from ..cost.chain import ChainStages
from ..cost.device_classes import Devices
from ..search.arcs import SearchSpace


def get_rule(options: PlanOptions) -> Literal["no", "grid", "equal_blocks"]:
    """Return what every plan has to keep; a preference within a tolerance is no rule."""
    return options.regular if options.regular_within is None else "no"


def list_equal_cuts(
    profile: Profile, options: PlanOptions, num_devices: int
) -> Iterator[tuple[int, ...]]:
    """Yield the cuts into stages of equally many blocks, with the ends of the model."""
    stack = find_profile_stack(profile)
    most = min(options.max_stages or stack.num_blocks, num_devices)
    for num_stages in range(1, most + 1):
        share, rest = divmod(stack.num_blocks, num_stages)
        if not rest and options.num_stages in (None, num_stages):
            inner = (stack.starts[share * stage] for stage in range(1, num_stages))
            yield (0, *inner, stack.num_layers)


def regular_spaces(space: SearchSpace) -> Iterator[SearchSpace]:
    """Yield spaces that together hold the plans of a space that keep the rule of its options."""
    rule = get_rule(space.options)
    if rule == "no":
        yield space
        return
    tables = space.tables
    # One stage is regular with any number of replicas.
    whole = (tables.first == 0) & (tables.last == tables.num_atoms)
    yield replace(space, only=whole if space.only is None else space.only & whole)
    for count in _replica_counts(space.devices, space.options):
        if _takes_whole_class(space.devices, count):
            continue
        options = space.options.model_copy(update={"max_replicas": count})
        grid = replace(space, options=options, min_replicas=count)
        if rule == "equal_blocks":
            yield from _with_equal_blocks(grid)
        else:
            yield grid


def _replica_counts(devices: Devices, options: PlanOptions) -> range:
    if options.objective == "latency":
        return range(1, 2)
    most = max(len(entry) for entry in devices.classes)
    most = min(most, options.num_microbatches, options.max_replicas or most)
    return range(1, most + 1)


def _takes_whole_class(devices: Devices, count: int) -> bool:
    """Return True if no second stage of that many replicas fits the only class of devices."""
    if len(devices.classes) > 1:
        return False
    entry = devices.classes[0]
    last = entry.place(len(entry), count, is_last=True)
    return last < count or entry.place(last - count, count, is_last=False) < count


def _with_equal_blocks(grid: SearchSpace) -> Iterator[SearchSpace]:
    tables = grid.tables
    if not isinstance(tables, ChainStages):
        return  # refused by `check_options`: blocks are counted in the profile's own order
    index = {layer: position for position, layer in enumerate(tables.positions)}
    most = len(grid.devices.cluster.devices) // grid.min_replicas
    for cuts in list_equal_cuts(tables.profile, grid.options, most):
        if len(cuts) == 2 or not all(cut in index for cut in cuts):
            continue
        only = np.zeros(len(tables.first), dtype=np.bool_)
        for first, last in pairwise(cuts):
            only |= (tables.first == index[first]) & (tables.last == index[last])
        options = grid.options.model_copy(update={"num_stages": len(cuts) - 1})
        only = only if grid.only is None else only & grid.only
        yield replace(grid, options=options, only=only)


def find_irregularity(assignment: Assignment, profile: Profile, options: PlanOptions) -> str:
    """Return what a plan does against the rule, as a predicate; empty if it keeps it."""
    rule = get_rule(options)
    if rule == "no":
        return ""
    if len(set(assignment.replicas)) > 1:
        return f"has {list(assignment.replicas)} replicas, not equally many in every stage"
    if rule == "equal_blocks":
        stack = find_profile_stack(profile)
        counts = [
            stack.count(last) - stack.count(first) for first, last in pairwise(assignment.cuts)
        ]
        if len(set(counts)) > 1:
            return f"has {counts} blocks, not equally many in every stage"
    return ""
