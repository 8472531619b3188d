"""A plan whose search the deadline ended says so."""

from __future__ import annotations

import time

import pytest

from stagewright import Cluster, PlanOptions, plan
from stagewright.planner.assemble import was_cut_short
from tests.builders import chain_profile


def test_a_plan_with_time_enough_has_no_such_note() -> None:
    found = plan(chain_profile([1.0] * 6), Cluster.parse("2x1GB"), PlanOptions(), deadline_s=60)
    assert not was_cut_short(found)


def test_a_planner_in_a_hurry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second; seven allow for few."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    profile = chain_profile([1.0 + 0.37 * (index * 7 % 11) for index in range(40)])
    options = PlanOptions(schedule="zero_bubble", num_microbatches=12)
    found = plan(profile, Cluster.parse("6x1GB"), options, deadline_s=7)
    assert was_cut_short(found)
