"""A plan whose search the deadline ended says so."""

from __future__ import annotations

import math
import time

import pytest

from stagewright import Cluster, PlanOptions, plan
from stagewright.core.plan.plan import Plan
from stagewright.planner.plan import NOTE, note_cut_short, was_cut_short
from tests.builders import chain_profile

NOW_S = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: NOW_S)


def planned(lower_bound: float) -> Plan:
    """A plan proven to a bound."""
    found = plan(chain_profile([1.0, 2.0, 3.0]), Cluster.parse("2x1GB"), PlanOptions())
    proof = found.proof.model_copy(update={"lower_bound": lower_bound, "status": "bounded"})
    return found.model_copy(update={"proof": proof})


@pytest.mark.usefixtures("clock")
def test_late_and_not_proven_is_cut_short() -> None:
    found = note_cut_short(planned(1.0), 0.0, NOW_S - 9, NOW_S + 1)
    assert was_cut_short(found)
    assert found.notes[-1] == NOTE


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("lower_bound", "gap", "began_s", "deadline_s"),
    [
        (1.0, 0.0, NOW_S - 1, NOW_S + 9),  # it had much time left
        (1.0, 0.0, NOW_S - 9, math.inf),
        (1.0, 0.99, NOW_S - 9, NOW_S + 1),  # as close as it was to be
        (1e9, 0.0, NOW_S - 9, NOW_S + 1),  # proven
    ],
)
def test_else_it_is_not(lower_bound: float, gap: float, began_s: float, deadline_s: float) -> None:
    found = planned(lower_bound)
    assert note_cut_short(found, gap, began_s, deadline_s) is found


def test_a_plan_with_time_enough_has_no_such_note() -> None:
    found = plan(chain_profile([1.0] * 6), Cluster.parse("2x1GB"), PlanOptions(), deadline_s=60)
    assert not was_cut_short(found)


def test_a_planner_in_a_hurry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second; seven allow for few."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    profile = chain_profile([1.0 + 0.37 * (index * 7 % 11) for index in range(40)])
    options = PlanOptions(max_replicas=None, schedule="zero_bubble", num_microbatches=12)
    found = plan(profile, Cluster.parse("6x1GB"), options, deadline_s=7)
    assert found.proof.search_gap == 0 or was_cut_short(found)
    assert was_cut_short(found)
