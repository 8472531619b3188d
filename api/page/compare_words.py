"""Reasons why one of several plans is the fastest, in a sentence for each of the others."""

from __future__ import annotations

from typing import NamedTuple

from ...core.service.documents import ComparedPlan, Comparison
from ...core.units import format_time
from ...view.html import percent

NOTICEABLE = 0.005
"""Smallest difference that is mentioned beside a larger one, in shares of the best time."""


class _Split(NamedTuple):
    """Seconds of a step that a device computes and waits, on average; for one sample if known."""

    busy_s: float
    idle_s: float

    @property
    def total_s(self) -> float:
        return self.busy_s + self.idle_s


def explain_fastest(comparison: Comparison) -> list[str]:
    """Say how much slower each other plan is, and whether its devices compute longer or wait."""
    plans = {plan.id: plan for plan in comparison.plans if plan.step_time_s is not None}
    best = plans.get(comparison.fastest or "")
    if best is None:
        return []
    by_sample = comparison.is_by_sample
    numbers = {plan.id: place for place, plan in enumerate(comparison.plans, 1)}
    mine = _split(best, by_sample)
    return [
        _explain(mine, _split(other, by_sample), numbers[best.id], numbers[other.id], by_sample)
        for other in plans.values()
        if other.id != best.id
    ]


def _split(plan: ComparedPlan, by_sample: bool) -> _Split:
    total_s = 1 / plan.samples_per_s if by_sample and plan.samples_per_s else plan.step_time_s or 0
    idle = plan.bubble_fraction or 0.0
    return _Split(total_s * (1 - idle), total_s * idle)


def _explain(best: _Split, other: _Split, first: int, second: int, by_sample: bool) -> str:
    of = "sample" if by_sample else "step"
    if not best.total_s or other.total_s / best.total_s < 1.0005:
        return f"Plans {first} and {second} are equally fast."
    ratio = other.total_s / best.total_s
    more = f"{percent(ratio - 1)} longer" if ratio < 2 else f"{ratio:.1f} times as long"
    slower = f"Plan {second} takes {more} per {of} {'than' if ratio < 2 else 'as'} plan {first}"
    computing, waiting = other.busy_s - best.busy_s, other.idle_s - best.idle_s
    busy = f"compute {format_time(other.busy_s)} instead of {format_time(best.busy_s)}"
    idle = f"wait {format_time(other.idle_s)} instead of {format_time(best.idle_s)}"
    parts = sorted([(computing, busy), (waiting, idle)], reverse=True)
    said = parts[0][1]
    if abs(parts[1][0]) > NOTICEABLE * best.total_s:
        said += f", {'and' if parts[1][0] > 0 else 'but'} {parts[1][1]}"
    return f"{slower}: its devices {said} (the mean of all devices)."
