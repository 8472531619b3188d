"""Warm-up of 1F1B, stage by stage: more micro-batches in flight hide slow links, if they fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...schedules.warmup_depths import default_depths
from ..cost.assignment import Assignment
from ..cost.plan_cost import Priced, Pricer
from ..search.branch_and_bound import ROUNDING
from .tournament import Race

MAX_STARTS = 2
"""Plans of different numbers of stages whose warm-up is changed."""

NEAR = 0.3
"""How far above the fastest plan, relatively, they may be: hidden links may gain as much."""

STEPS = (-4, -2, -1, 1, 2, 4)
"""By how much a warm-up is changed."""

MAX_ROUNDS = 8
"""How often every stage's warm-up is changed."""


def deepen(race: Race, rounds: int = MAX_ROUNDS) -> None:
    """Let the fastest plans compete with other warm-ups, up to the extra the options allow.

    First all stages run as far ahead as they may and have room for, then one after the other,
    or all up to one, is changed while that helps. Last, stages give up what does not help.

    Args:
        race: With plans of the schedule's own warm-up.
        rounds: How often every stage's warm-up is changed.
    """
    options = race.request.options
    if options.schedule != "1f1b" or not options.max_extra_in_flight:
        return
    for start in race.leaders(MAX_STARTS, NEAR):
        own = Race(race.request)
        own.enter([start, *_uniform(race.pricer, start)])
        for _ in range(rounds):
            before = own.best
            for stage, change in product(range(start.num_stages - 1), STEPS):
                if own.best is not None and not own.is_over:
                    own.enter(_changed(race.pricer, own.best.assignment, stage, change))
            if own.best is before:
                break
        if own.best is not None:
            race.offer(_trimmed(own, own.best))


def _trimmed(race: Race, best: Priced) -> Priced:
    """With fewer in flight, stage by stage, where the step is the same but for rounding."""
    pricer, limit_s = race.pricer, best.step_time_s * (1 + ROUNDING)
    before: Priced | None = None
    while before is not best:
        before = best
        for stage in range(best.assignment.num_stages):
            extra = _extra(best.assignment)
            held = extra[stage]
            for less in sorted({0, held // 2, held - 1} if held else ()):
                if race.request.is_over:
                    return best
                wanted = [*extra[:stage], less, *extra[stage + 1 :]]
                found = pricer.priced_if_usable(_with(pricer, best.assignment, wanted))
                if found is not None and found.step_time_s <= limit_s:
                    best = found
                    break
    return best


def _extra(assignment: Assignment) -> list[int]:
    return list(assignment.extra_depths or (0,) * assignment.num_stages)


def _uniform(pricer: Pricer, start: Assignment) -> Iterator[Assignment]:
    """As many extra on every stage as it has room for, up to more and more."""
    most = pricer.options.max_extra_in_flight
    extra = 1
    while extra < 2 * most:
        yield _with(pricer, start, [min(extra, most)] * start.num_stages)
        extra *= 2


def _changed(pricer: Pricer, start: Assignment, stage: int, change: int) -> Iterator[Assignment]:
    """One stage's warm-up changed, and that of all stages up to it."""
    extra = _extra(start)
    for first in dict.fromkeys((stage, 0)):
        changed = [entry + change for entry in extra[first : stage + 1]]
        yield _with(pricer, start, [*extra[:first], *changed, *extra[stage + 1 :]])


def _with(pricer: Pricer, start: Assignment, wanted: list[int]) -> Assignment:
    """With so many extra, no more than allowed, than fit, and than make sense in front of others.

    The last stage has nothing to wait for, and no stage waits for more micro-batches than those
    in front of it let through (`check_depths`).
    """
    plain = replace(start, extra_depths=())
    m, replicas = pricer.num_microbatches, start.replicas
    own, allowed = default_depths(m, replicas), pricer.options.max_extra_in_flight
    extra: list[int] = []
    ahead = m
    for stage, price in enumerate(pricer.stages(plain)):
        most = min(allowed, wanted[stage], -(-m // replicas[stage]) - own[stage])
        each = price.memory.activations_bytes // own[stage]
        if price.limit_bytes is not None and each:
            most = min(most, (price.limit_bytes - price.memory.total_bytes) // each)
        most = min(most, (ahead - 1) // replicas[stage] + 1 - own[stage])
        extra.append(max(0, most) if stage + 1 < len(replicas) else 0)
        ahead = min(ahead, (own[stage] + extra[-1]) * replicas[stage])
    return replace(start, extra_depths=tuple(extra) if any(extra) else ())
