"""Remedies: changes of an infeasible request under which there would be a plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster.cluster import Cluster
from .plan import PlanOptions


@dataclass(frozen=True)
class Remedy:
    """Change of a request under which there would be a plan.

    Attributes:
        text: The change in words, such as ``recompute='auto'``.
        cluster: Cluster of the changed request.
        options: Options of the changed request.
        step_time_s: Step of its plan; `None` if there was no time to find one.
        is_settled: False if the search was cut short, so the step may be shorter.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    step_time_s: float | None = None
    is_settled: bool = True
