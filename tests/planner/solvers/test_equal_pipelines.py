"""Plans of groups of devices compete, and make realistic plans faster."""

import random
import time

import pytest

from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers import equal_pipelines, step_time
from stagewright.planner.solvers.equal_pipelines import list_equal_pipelines
from stagewright.planner.validation.validate import validate
from tests.planner.uneven import nodes, uneven_profile


def options(**changes):
    asked = {"num_microbatches": 128, "max_replicas": None, "recompute": "auto"}
    return PlanOptions.model_validate({**asked, **changes})


def search(profile, cluster, asked):
    """What is yielded, and the requests that the solver was given."""
    request, seen = PlanningRequest(profile, cluster, asked), []

    def solver(part):
        seen.append(part)
        return step_time._list_leaders(part, float("inf"))

    return request, list(list_equal_pipelines(request, solver)), seen


@pytest.mark.parametrize(
    ("layers", "seed", "count", "memory_gb", "gain"),
    [(100, 3, 16, 24, 0.02), (48, 1, 8, 16, 0.015)],
)
def test_plans_of_groups_are_taken_where_they_are_faster(
    monkeypatch, layers, seed, count, memory_gb, gain
):
    profile, cluster = uneven_profile(layers, seed), nodes(count, memory_gb)
    asked = options(num_microbatches=16 * count)
    made = plan(profile, cluster, asked)
    validate(made, profile, cluster)
    monkeypatch.setattr(step_time, "list_equal_pipelines", lambda *_: ())
    assert made.step_time_s < plan(profile, cluster, asked).step_time_s * (1 - gain)


def test_every_candidate_fits_groups_of_the_devices():
    request, found, (part,) = search(uneven_profile(48, 1), nodes(8, 16), options())
    assert len(part.cluster.devices) == 8
    assert part.options.num_microbatches == 16
    assert len({entry.num_stages for entry in found}) == len(found) > 1
    for entry in found:
        assert all(count % 8 == 0 for count in entry.replicas)
        assert request.cost_model.evaluate_if_feasible(entry) is not None


@pytest.mark.parametrize(
    ("count", "changes", "groups"),
    [
        (8, {"max_replicas": 16}, 8),
        (8, {"max_replicas": 7}, None),
        (8, {"num_microbatches": 7}, None),
        (7, {}, 7),
        (11, {}, None),  # no equal groups of whole nodes, at most eight
        (8, {"regular": "grid"}, None),
    ],
)
def test_groups_are_equal_and_aligned_with_nodes(count, changes, groups):
    _, found, seen = search(uneven_profile(24), nodes(count, 32), options(**changes))
    assert [len(part.cluster.devices) for part in seen] == ([groups] if groups else [])
    if changes.get("max_replicas"):
        assert all(max(entry.replicas) <= changes["max_replicas"] for entry in found)


def test_several_kinds_are_not_grouped():
    cluster = nodes(8, 32)
    slow = [device.model_copy(update={"speed": 0.5}) for device in cluster.devices[32:]]
    mixed = cluster.model_copy(update={"devices": (*cluster.devices[:32], *slow)})
    assert search(uneven_profile(24), mixed, options())[1:] == ([], [])


def test_pins_hold_for_groups():
    asked = options(pins=(Pin(layer="layer.20", stage=1),))
    request, found, _ = search(uneven_profile(24), nodes(8, 16), asked)
    assert found
    assert all(request.allows(entry) for entry in found)


@pytest.mark.parametrize("seed", range(8))
def test_groups_make_no_plan_slower(monkeypatch, seed):
    """An early good plan once ended the variations that led to a better one."""
    draw = random.Random(seed)
    profile = uneven_profile(draw.choice([24, 48, 100]), seed)
    cluster = nodes(draw.choice([2, 3, 4, 8]), draw.choice([12, 16, 24, 40]))
    asked = options(
        num_microbatches=draw.choice([24, 60, 128]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        max_extra_in_flight=0,
    )
    made = plan(profile, cluster, asked)
    monkeypatch.setattr(step_time, "list_equal_pipelines", lambda *_: ())
    assert made.step_time_s <= plan(profile, cluster, asked).step_time_s * (1 + 1e-12)


def test_no_group_is_planned_without_time(monkeypatch):
    monkeypatch.setattr(equal_pipelines, "LEAST_S", 1e9)
    request = PlanningRequest(
        uneven_profile(24), nodes(8, 32), options(), deadline=time.monotonic() + 100
    )
    assert list(list_equal_pipelines(request, lambda _: pytest.fail("planned"))) == []
