"""The splits printed beside a plan: on as many devices, never faster, and with their reasons."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.assemble import was_cut_short
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.problem.problem import Progress
from stagewright.planner.solvers.solve import solve
from stagewright.planner.validation.validate import validate
from tests.builders import (
    boundary,
    chain_profile,
    random_profile,
    two_level_cluster,
)

CLUSTERS = [Cluster.parse("4xcpu"), Cluster.parse("2x4xcpu"), two_level_cluster(6)]


def told(made):
    return {entry.name: entry for entry in made.baselines}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_slower_than_what_is_printed_beside_it_even_without_time(seed, schedule):
    profile, cluster = random_profile(seed, 24, illegal=0.0), CLUSTERS[seed % 3]
    options = PlanOptions(schedule=schedule, max_replicas=[1, None][seed % 2])
    for deadline_s in (0.0, None):
        made = plan(profile, cluster, options, deadline_s=deadline_s)
        times_s = [entry.step_time_s for entry in made.baselines]
        assert times_s
        assert all(time_s is None or time_s >= made.step_time_s for time_s in times_s)
        validate(made, profile, cluster)


def test_a_plan_cut_short_still_has_a_bound():
    profile = random_profile(5, 24)
    proof = plan(profile, "4xcpu", deadline_s=0.0).proof
    assert proof.status == "feasible"
    assert 0 < proof.lower_bound <= plan(profile, "4xcpu").proof.lower_bound


def test_one_stage_is_compared_with_pipelines_not_with_itself():
    profile = chain_profile([1, 2, 1, 3], parameter_bytes=4)
    made = plan(profile, "4xcpu", PlanOptions(max_replicas=None))
    assert (made.num_stages, made.stages[0].replicas) == (1, 4)
    equal = told(made)["equal_layers"]
    assert equal.balance == (1, 1, 1, 1)
    assert equal.devices == (("cpu:0",), ("cpu:1",), ("cpu:2",), ("cpu:3",))
    by_hand = plan_from_balance(profile, Cluster.parse("4xcpu"), None, [1, 1, 1, 1])
    assert equal.step_time_s == by_hand.step_time_s > made.step_time_s
    assert "equal layer counts [1, 1, 1, 1], one device a stage" in str(made)
    assert told(plan(profile, "1xcpu")) == {}


def test_replicas_are_compared_with_as_many_devices():
    """Two devices hold the heavy layer; other cuts keep both, and copies take all three."""
    profile = chain_profile([1, 1, 4], parameter_bytes=4_000_000)
    cluster = Cluster.uniform(3, bandwidth_bytes_per_s=1e6)
    options = PlanOptions(num_microbatches=6, max_replicas=None, num_stages=None)
    made = plan_from_balance(profile, cluster, options, [2, 1], replicas=[1, 2])
    validate(made, profile, cluster)
    found = told(made)
    assert (found["equal_layers"].balance, found["equal_layers"].devices) == ((2, 1), ())
    copies = found["data_parallel"]
    assert copies.devices == (("device:0", "device:1", "device:2"),)
    alone = plan_from_balance(profile, cluster, options, [3], replicas=[3])
    assert copies.step_time_s == alone.step_time_s
    assert "data parallel on 3 devices" in str(made)


def test_copies_are_not_compared_where_they_may_not_be():
    profile = chain_profile([1, 1, 4])
    assert "data_parallel" not in told(plan(profile, "3xcpu", PlanOptions(max_replicas=1)))


def test_what_cannot_be_used_says_why_with_both_numbers():
    profile = chain_profile([1, 1, 9, 1], saved_bytes=100)
    cluster = Cluster.uniform(2, memory_bytes=399)
    made = plan(profile, cluster, PlanOptions(num_microbatches=2, optimizer="none"))
    equal = told(made)["equal_layers"]
    assert equal.step_time_s is None
    assert equal.reason == (
        "stage 0 needs 400 B (400 bytes), device 'device:0' allows 399 B (399 bytes)"
    )
    assert f"equal layer counts [2, 2] cannot be used: {equal.reason}" in str(made)


def test_a_cut_that_is_not_legal_is_named():
    gaps = (boundary(0), boundary(1, legal=False), boundary(2))
    profile = chain_profile([1] * 4)
    profile = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    reason = "no cut may be made behind layer 'layer.1': a test forbids it"
    assert told(plan(profile, "2xcpu"))["equal_layers"].reason == reason
    options = PlanOptions(num_stages=2, no_cut_after=("layer.1",))
    forbidden = plan(chain_profile([1] * 4), "2xcpu", options)
    assert told(forbidden)["equal_layers"].reason.endswith("'layer.1': the options forbid it")


@pytest.mark.parametrize(("recompute", "memory_bytes"), [("always", None), ("auto", 1399)])
def test_baselines_with_recomputation_are_counted_again(recompute, memory_bytes):
    """A pipeline's first stage keeps four micro-batches of 100 bytes a layer, copies keep one."""
    profile = chain_profile([1] * 8, saved_bytes=100)
    cluster = Cluster.uniform(2, memory_bytes=memory_bytes)
    options = PlanOptions(num_microbatches=4, max_replicas=2, recompute=recompute, schedule="gpipe")
    made = plan(profile, cluster, options)
    validate(made, profile, cluster)
    assert made.num_stages == 1
    equal = told(made)["equal_layers"]
    assert (equal.balance, equal.step_time_s) == ((4, 4), pytest.approx(5 * 16.0))


def test_idle_devices_are_told():
    made = plan(chain_profile([1, 1]), "4xcpu", PlanOptions(num_microbatches=8))
    assert (made.cluster_devices, made.num_stages) == (4, 2)
    assert made.notes == (
        "2 of 4 devices stay idle: cpu:2, cpu:3; max_replicas=None lets stages be copied to "
        "several devices",
    )
    options = PlanOptions(num_microbatches=12, max_replicas=None)
    cluster = Cluster.parse("2x4xcpu")
    gaps = plan_from_balance(chain_profile([1, 1]), cluster, options, [1, 1], replicas=[3, 3])
    assert gaps.notes == (
        "2 of 8 devices stay idle: cpu:0, cpu:4; 1 of them lies between used ones, as a stage "
        "lies inside one group of devices or is made of whole ones",
    )
    many = plan(chain_profile([1]), "9xcpu").notes
    assert many == (
        "8 of 9 devices stay idle: cpu:1, cpu:2, cpu:3, cpu:4 and 4 more; max_replicas=None lets "
        "stages be copied to several devices",
    )
    assert plan(chain_profile([1, 1]), "2xcpu").notes == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "gpipe", "max_replicas": None},
        {"schedule": "zero_bubble"},
        {"objective": "throughput"},
        {"objective": "memory"},
        {"objective": "devices"},
        {"objective": "balance_time"},
    ],
    ids=str,
)
def test_progress_never_gets_worse_and_ends_with_what_is_proven(changes):
    """Cause: the last report was of the plan the simulator preferred, with no bound."""
    profile, options = random_profile(4, 40, illegal=0.0), PlanOptions(**changes)
    seen = []
    made = plan(profile, "4x1GB", options, progress=seen.append)
    values, bounds = [entry.value for entry in seen], [entry.lower_bound for entry in seen]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert values[-1] == pytest.approx(made.proof.value, rel=1e-9)
    assert bounds[-1] == pytest.approx(made.proof.lower_bound, rel=1e-9)
    # Callers whose search is ended keep the plans that were reported.
    kept = [entry.plan() for entry in seen if entry.plan]
    assert [each.proof.value for each in kept] == sorted(set(values), reverse=True)
    assert all(was_cut_short(each) for each in kept)


def test_reports_that_are_worse_than_earlier_ones_are_held_back(monkeypatch):
    def telling(request):
        for value, bound in ((5e6, 1e-9), (7e6, 0.0), (4e6, 0.0), (6e6, 2e-9)):
            request.progress(Progress(0.0, value, bound))
        return solve(request)

    monkeypatch.setattr("stagewright.planner.plan.solve", telling)
    seen = []
    plan(chain_profile([1, 1]), "2xcpu", progress=seen.append)
    told = [(entry.value, entry.lower_bound) for entry in seen]
    assert told[:3] == [(5e6, 1e-9), (4e6, 1e-9), (4e6, 2e-9)]
