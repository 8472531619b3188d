"""Replicas that cost nothing: a last stage that has a part of a group takes all of it."""

from __future__ import annotations

from dataclasses import replace

from ..cost.assignment import Assignment
from ..cost.plan_cost import Pricer
from ..search.branch_and_bound import ROUNDING


def filled(assignment: Assignment, pricer: Pricer) -> Assignment:
    """The same with the last stage of each class on whole groups, if nothing speaks against it.

    No other stage may use the rest of a group that a last stage has a part of, and gradients are
    summed over as many groups either way. The search stops at the fewest replicas that will do,
    which rarely have a divisor in common with those of the other stages; whole groups have, and
    the simulator then plays one of that many equal pipelines (`simulate.step_time`).
    """
    replicas, ends = list(assignment.replicas), list(assignment.ends)
    for stage in _last_stages(assignment):
        more = _missing(assignment, stage, pricer)
        replicas[stage] += more
        ends[stage] += more
    if replicas == list(assignment.replicas):
        return assignment
    found = replace(assignment, replicas=tuple(replicas), ends=tuple(ends))
    return found if _is_as_good(found, assignment, pricer) else assignment


def _last_stages(assignment: Assignment) -> list[int]:
    """The stage on the last devices used, of each class."""
    last: dict[int, int] = {}
    for stage in sorted(range(assignment.num_stages), key=assignment.ends.__getitem__):
        last[assignment.classes[stage]] = stage
    return list(last.values())


def _missing(assignment: Assignment, stage: int, pricer: Pricer) -> int:
    """Replicas more with which a stage has whole groups; 0 where that is no stage."""
    entry = pricer.devices.classes[assignment.classes[stage]]
    count, end = assignment.replicas[stage], assignment.ends[stage]
    size = max((size for size in entry.group_sizes[:-1] if size < count), default=1)
    more = -count % size
    most = min(pricer.options.max_replicas or len(entry), pricer.num_microbatches)
    if count + more > most or end + more > len(entry):
        return 0
    return more if entry.place(end + more, count + more, is_last=True) == end + more else 0


def _is_as_good(found: Assignment, before: Assignment, pricer: Pricer) -> bool:
    """Whether it fits, and neither the objective nor the closed form of the step is worse."""
    stages, old = pricer.stages(found), pricer.stages(before)
    if not pricer.fits(stages, found):
        return False
    tied_s = pricer.tied_sync_s(before)
    is_slower = pricer.model_s(stages, tied_s) > pricer.model_s(old, tied_s) * (1 + ROUNDING)
    value, limit = pricer.value(found, stages, tied_s), pricer.value(before, old, tied_s)
    return not is_slower and value <= limit * (1 + ROUNDING)
