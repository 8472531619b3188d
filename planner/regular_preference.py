"""Regular plans as a preference: taken unless they are too much slower than others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible
from ..core.plan.plan import Plan, PlanOptions
from .problem.problem import Progress


class Attempt(Protocol):
    """Function that plans until a deadline on the clock of `time.monotonic`."""

    def __call__(
        self,
        cluster: Cluster,
        options: PlanOptions,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
        /,
    ) -> Plan: ...


def prefer_regular(
    attempt: Attempt,
    cluster: Cluster,
    options: PlanOptions,
    deadline: float,
    progress: Callable[[Progress], None] | None = None,
    /,
) -> Plan:
    """Return the best regular plan if it is within the tolerance of the best one, else that.

    Half of the time left goes to each. The proof of either is about all plans; its options say
    which one it is, as a rule.
    """
    left_s = deadline - time.monotonic()
    free_deadline = deadline if deadline == math.inf else deadline - left_s / 2
    changes = {"regular": "no", "regular_within": None}
    free = attempt(cluster, options.model_copy(update=changes), free_deadline, progress)
    name = options.regular
    try:
        rule = options.model_copy(update={"regular_within": None})
        found = attempt(cluster, rule, deadline, None)
    except Infeasible as error:
        return _add_note(free, f"no regular plan ({name}): {error}")
    except DeadlineExceeded:
        return _add_note(free, f"no regular plan ({name}) was found in time")
    within = options.regular_within or 0.0
    least, cost = free.proof.value, found.proof.value
    price = cost / least - 1 if least else 0.0
    if price > within:
        text = f"the regular plan ({name}) is {price:.1%} slower, more than {within:.1%}"
        return _add_note(free, text)
    cost_words = f"{price:.1%} slower than" if price >= 5e-4 else "as fast as"
    text = f"regular plan ({name}), {cost_words} the best found without that rule"
    proof = free.proof
    return _add_note(found.with_bounds(proof.lower_bound, proof.simulated_lower_bound_s), text)


def _add_note(plan: Plan, text: str) -> Plan:
    return plan.model_copy(update={"notes": (*plan.notes, text)})
