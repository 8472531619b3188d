"""Plans of searches that their deadline ended."""

from __future__ import annotations

import math
import time

from ..core.plan.plan import Plan

NOTE = "the search was cut short by its deadline: with more time there may be a better plan"

UNHURRIED = 0.5
"""Of the time allowed: a search that took less was not steered by its deadline."""


def marked(plan: Plan, gap: float, began_s: float, deadline_s: float) -> Plan:
    """The plan, with a note if its search could not go as far as it was asked to.

    Args:
        plan: What was found.
        gap: How close to the best it was to be proven.
        began_s: When the search began, on the clock of `time.monotonic`.
        deadline_s: When it had to end, on the same; infinite for never.
    """
    if deadline_s == math.inf or plan.proof.search_gap <= gap:
        return plan
    if time.monotonic() - began_s < UNHURRIED * (deadline_s - began_s):
        return plan
    return plan.model_copy(update={"notes": (*plan.notes, NOTE)})


def was_cut_short(plan: Plan) -> bool:
    """Whether more time may find a better one."""
    return NOTE in plan.notes
