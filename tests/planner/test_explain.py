"""What binds a plan, what changes buy and what others do: each number found another way."""

import re
from collections import Counter

import pytest

import stagewright
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.explanation import Explanation
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.explain import explain
from stagewright.planner.heuristics.candidates import rejection_reason
from stagewright.planner.heuristics.published_rules import equal_layers
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.remedies import with_devices
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.planner.solvers.solve import solve
from stagewright.schedules.layout import lay_out
from tests.builders import chain_profile, random_cluster, random_profile

EXACT = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e12}


def shares_of(found):
    shares = found.shares
    return shares.work, shares.fill, shares.links, shares.gradients


def alternative(found, text):
    (entry,) = [entry for entry in found.alternatives if entry.text == text]
    return entry


def test_two_equal_stages_work_and_fill():
    """Four micro-batches of 3 s a stage: 12 s of work, and 3 s until the last one is through."""
    profile, cluster = chain_profile([1, 1]), Cluster.uniform(2, **EXACT)
    made = plan(profile, cluster, PlanOptions(num_microbatches=4))
    found = explain(made, profile, cluster)
    assert found.step_time_s == 15
    assert shares_of(found) == pytest.approx((12 / 15, 3 / 15, 0, 0))
    assert (found.bound, found.reason) == ("work", "device 'device:0' computes for 80.0% of it")
    assert found.bubble == pytest.approx(0.2)
    twice = alternative(found, "twice the micro-batches")
    assert (twice.num_microbatches, twice.step_time_s) == (8, 27)
    assert twice.time_per_sample_s == pytest.approx(27 / 8)
    assert twice.gain == pytest.approx(1 - (27 / 8) / (15 / 4))
    assert alternative(found, "links twice as fast").gain == 0
    replicas = alternative(found, "replicas allowed")
    assert replicas.step_time_s == 12
    assert not any("planned again" in entry.text for entry in found.alternatives)


def test_few_microbatches_are_bound_by_filling():
    profile, cluster = chain_profile([1] * 4), Cluster.uniform(4, **EXACT)
    made = plan(profile, cluster, PlanOptions(num_microbatches=1, schedule="gpipe", num_stages=4))
    found = explain(made, profile, cluster)
    assert (found.bound, found.shares.fill) == ("fill", 0.75)
    assert "with 1 micro-batch over 4 stages" in found.reason


def test_slow_links_bind_and_the_cut_is_named():
    """A message of 10 s each way; with one micro-batch 20 of 26 s are sending."""
    profile = chain_profile([1, 1], forward_bytes=10)
    cluster = Cluster.uniform(2, latency_s=0.0, bandwidth_bytes_per_s=1.0)
    options = PlanOptions(num_microbatches=1, num_stages=2, schedule="gpipe")
    found = explain(plan(profile, cluster, options), profile, cluster)
    assert (found.bound, found.busiest_link) == ("links", 0)
    assert found.shares.links == pytest.approx(20 / 26)
    assert found.link_busy == pytest.approx(20 / 26)
    faster = alternative(found, "links twice as fast")
    assert faster.step_time_s == 16
    assert faster.gain == pytest.approx(10 / 26)


def test_summing_gradients_binds():
    """Two replicas of 3 s each, and 40 s until 40 bytes are summed."""
    profile = chain_profile([1], parameter_bytes=40)
    cluster = Cluster.uniform(2, latency_s=0.0, bandwidth_bytes_per_s=1.0)
    made = plan_from_balance(profile, cluster, PlanOptions(num_microbatches=2), [1], replicas=[2])
    found = explain(made, profile, cluster)
    assert found.bound == "gradients"
    assert found.shares.gradients == pytest.approx(40 / 43)
    again = alternative(found, "planned again, for the least step")
    assert again.step_time_s == 6  # one device does both


def test_memory_binds_where_limits_keep_layers_apart():
    """The slow layer should be alone by work; then three layers' activations do not fit."""
    profile = chain_profile([3, 1, 1, 1], saved_bytes=100)
    cluster = Cluster.uniform(2, memory_bytes=800, **EXACT)
    made = plan(profile, cluster, PlanOptions(num_microbatches=4, schedule="gpipe"))
    found = explain(made, profile, cluster)
    assert (made.balance, made.step_time_s) == ((2, 2), 54)
    assert found.bound == "memory"
    assert found.memory_used == 1.0
    assert found.unlimited_step_time_s == 18 + 3 * 9
    assert found.reason.endswith("without memory limits it would be 45 s")
    more = alternative(found, "10 % more memory")
    assert (more.step_time_s, more.gain, more.unit) == (made.step_time_s, 0, "GiB")


@pytest.mark.parametrize("seed", range(8))
def test_every_alternative_is_what_planning_it_gives(seed):
    profile, options = random_profile(seed, 5), PlanOptions(num_microbatches=6)
    cluster = random_cluster(seed, 3, memory_bytes=60_000)
    try:
        made = plan(profile, cluster, options)
    except Infeasible:
        pytest.skip("does not fit")
    found = explain(made, profile, cluster)
    assert Explanation.model_validate_json(found.model_dump_json()) == found
    assert sum(shares_of(found)) == pytest.approx(1)
    assert found.time_per_sample_s == made.step_time_s / 12  # two samples a micro-batch
    changed = {
        "one more device": (with_devices(cluster, 4), {}),
        "recomputation allowed": (cluster, {"recompute": "auto"}),
        "replicas allowed": (cluster, {"max_replicas": None}),
        "twice the micro-batches": (cluster, {"num_microbatches": 12}),
    }
    for text, (other, update) in changed.items():
        asked = options.model_copy(update=update)
        entry = alternative(found, text)
        step_s = plan(profile, other, asked).step_time_s
        if text != "twice the micro-batches":
            step_s = min(step_s, made.step_time_s)
        assert entry.step_time_s == step_s
        per_sample_s = step_s / asked.num_microbatches / 2
        assert entry.gain == pytest.approx(1 - per_sample_s / found.time_per_sample_s)
    device = alternative(found, "one more device")
    assert device.saved_s_per_unit == pytest.approx(made.step_time_s - device.step_time_s)
    for text in changed:
        assert text in str(found)


def test_others_are_priced_by_the_same_simulator():
    profile = chain_profile([1, 5, 2, 2, 1, 3], forward_bytes=10, parameter_bytes=400)
    cluster = Cluster.uniform(3)
    made = plan(profile, cluster)
    found = explain(made, profile, cluster)
    names = [entry.name for entry in found.comparisons]
    assert names == ["equal layers", "equal parameters", "torchgpipe", "data parallel", "PipeDream"]
    equal = found.comparisons[0]
    assert list(equal.balance) == equal_layers(6, 3)
    costed = plan_from_balance(profile, cluster, made.options, equal.balance)
    assert equal.step_time_s == costed.step_time_s
    assert equal.ratio == costed.step_time_s / made.step_time_s
    assert all(entry.ratio is None or entry.ratio >= 1 for entry in found.comparisons[:3])


def test_others_that_do_not_fit_say_so():
    profile = chain_profile([1, 1, 9, 1], saved_bytes=100)
    cluster = Cluster.uniform(2, memory_bytes=399)
    made = plan(profile, cluster, PlanOptions(num_microbatches=2, optimizer="none"))
    found = explain(made, profile, cluster)
    equal = found.comparisons[0]
    assert (equal.step_time_s, equal.reason) == (
        None, "stage 0 needs 400 B (400 bytes), device 'device:0' allows 399 B (399 bytes)",
    )  # fmt: skip
    assert f"cannot be used: {equal.reason}" in str(found)


def test_others_have_as_many_devices_as_the_plan():
    """Cause: plans with replicas were compared with pipelines of one device a stage."""
    profile = chain_profile([1, 1, 4], parameter_bytes=4_000_000)
    cluster = Cluster.uniform(4, bandwidth_bytes_per_s=1e6)
    options = PlanOptions(num_microbatches=6, max_replicas=2)
    made = plan_from_balance(profile, cluster, options, [2, 1], replicas=[1, 2])
    others = {entry.name: entry for entry in explain(made, profile, cluster).comparisons}
    assert {sum(entry.replicas) for entry in others.values()} == {3}
    copies = others["data parallel"]
    alone = plan_from_balance(profile, cluster, options, [3], replicas=[3])
    assert (copies.balance, copies.step_time_s) == ((3,), alone.step_time_s)
    assert copies.reason == "more replicas than max_replicas=2 allows"
    one = plan_from_balance(profile, cluster, options, [3], replicas=[2])
    for entry in explain(one, profile, cluster).comparisons:
        assert (entry.balance, entry.replicas) != (one.balance, (one.stages[0].replicas,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": chain_profile([2, 1])}, r"from the profile profile_\w+ of 'Chain', not from "),
        ({"cluster": "3xcpu"}, "for 2 devices .'cpu:0' and others., not for 3 .'cpu:0'"),
        ({"cluster": "2x24GB"}, "stage 0 is on cpu:0, which the cluster does not have"),
        ({"cluster": Cluster.uniform(2, kind="cpu", latency_s=1.0)}, "send_forward_time_s is 1"),
        ({"profile": "profile.json"}, "the profile is a str; read it first"),
        ({"plan": "plan.json"}, "the plan is a str"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
    ],
)
def test_only_the_plans_own_profile_and_cluster_will_do(changes, said):
    """Cause: with others the numbers of two requests were mixed without a word."""
    profile = chain_profile([1, 1], forward_bytes=8)
    made = plan(profile, "2xcpu", PlanOptions(num_stages=2))
    given = {"plan": made, "profile": profile, "cluster": "2xcpu", **changes}
    with pytest.raises(InvalidInput, match=said):
        explain(**given)


def test_what_a_search_cut_short_found_is_marked():
    """Cause: the numbers of searches without time stood there as facts."""
    profile = random_profile(5, 24, illegal=0.0)
    made = plan(profile, "4x1GB")
    found, quick = explain(made, profile, "4x1GB"), explain(made, profile, "4x1GB", deadline_s=0.0)
    # Schedules without a closed form have no proof, whatever the time.
    formulas = [entry for entry in found.alternatives if "schedule" not in entry.text]
    assert all(entry.proven for entry in formulas)
    assert found.unlimited_proven
    lines = str(found.model_copy(update={"alternatives": tuple(formulas)}))
    assert "at most" not in lines
    assert not any(entry.proven for entry in quick.alternatives)
    assert not quick.unlimited_proven
    assert "at most" in str(quick)
    for entry, exact in zip(quick.alternatives, found.alternatives, strict=True):
        assert entry.text == exact.text
        assert entry.step_time_s >= exact.step_time_s


def test_a_plan_that_chose_its_microbatches_is_explained_at_their_size():
    inputs = (TensorSpec(name="x", shape=(4, 8), dtype="float32"),)
    profile = chain_profile([1, 1]).model_copy(update={"inputs": inputs})
    cluster = Cluster.uniform(2, **EXACT)
    made = plan(profile, cluster, PlanOptions(batch_size=8, num_microbatches=8))
    found = explain(made, profile, cluster)
    assert found.microbatch_size == 1
    assert found.time_per_sample_s == made.step_time_s / 8
    assert alternative(found, "twice the micro-batches").num_microbatches == 16


def test_latency_is_explained_without_a_backward():
    profile = chain_profile([1, 1])
    cluster = Cluster.uniform(2, **EXACT)
    made = plan(profile, cluster, PlanOptions(objective="latency", num_stages=2))
    found = explain(made, profile, cluster)
    assert shares_of(found) == pytest.approx((0.5, 0.5, 0, 0))
    assert all(entry.num_microbatches == 1 for entry in found.alternatives)


def check_busiest(made, found):
    """What is said of a device is the sum over its boxes in the timeline, and of a stage too."""
    of_rank, of_stage = Counter(), Counter()
    for event in plan_timeline(made).events:
        if event.kind in ("F", "B", "I", "W", "R"):
            of_rank[event.rank] += event.end_s - event.start_s
            of_stage[event.rank, event.stage] += event.end_s - event.start_s
    names = rank_names(made)
    rank, busy_s = max(of_rank.items(), key=lambda entry: entry[1])
    assert found.shares.work == pytest.approx(busy_s / made.step_time_s)
    fullest = {names[rank] for rank, held in of_rank.items() if held == pytest.approx(busy_s)}
    assert found.busiest_device in fullest
    rank = names.index(found.busiest_device)
    held = {stage: time_s for (on, stage), time_s in of_stage.items() if on == rank}
    assert held[found.busiest_stage] == pytest.approx(max(held.values()))
    assert found.busiest_stage_work == pytest.approx(max(held.values()) / made.step_time_s)
    assert found.busiest_device in found.reason or found.bound != "work"
    assert found.busiest_stage_work < found.shares.work or len(held) == 1


def rank_names(made):
    """The device of each rank."""
    layout = lay_out(made)
    names = [""] * layout.num_ranks
    for ranks, stage in zip(layout.stage_ranks, made.stages, strict=True):
        for rank, name in zip(ranks, stage.devices, strict=True):
            names[rank] = name
    return names


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_replicas": None},
        {"schedule": "interleaved_1f1b", "chunks": 4},
        {"schedule": "interleaved_zero_bubble"},
        {"schedule": "zbv"},
        {"schedule": "looped_bfs", "chunks": 3},
    ],
)
def test_figures_of_devices_are_of_devices_and_of_stages_of_stages(asked):
    """Cause: a stage was named with the share of all the stages of its device."""
    for seed in range(2):
        profile, cluster = random_profile(seed, 16, illegal=0.0), random_cluster(seed, 4)
        made = plan(profile, cluster, PlanOptions(num_microbatches=8, **asked))
        check_busiest(made, explain(made, profile, cluster, deadline_s=0.0))


def test_a_baseline_that_does_not_fit_names_the_device_of_several_stages():
    """Cause: stage 1 was said to need what all stages of its device need together."""
    profile = chain_profile([1, 1, 1, 1, 1, 1], saved_bytes=100)
    options = PlanOptions(num_microbatches=4, schedule="interleaved_1f1b", optimizer="none")
    cluster = Cluster.uniform(2, memory_bytes=10**6)
    made = plan(profile, cluster, options)
    whole = PlanningRequest(profile, cluster, options)
    held = made.memory_by_device()
    less = Cluster.uniform(2, memory_bytes=held["device:0"] - 1)
    request = PlanningRequest(profile, less, options)
    reason = rejection_reason(request, solve(whole).costed.assignment)
    assert re.match(r"device 'device:0' needs .* \(\d+ bytes\) for all its stages, and", reason)
    assert f"({held['device:0']} bytes)" in reason


def test_without_time_it_still_says_what_binds():
    profile = random_profile(2, 6)
    cluster = Cluster.parse("3xcpu")
    made = plan(profile, cluster)
    found = explain(made, profile, "3xcpu", deadline_s=0.0)
    assert found.shares == explain(made, profile, cluster).shares
    assert found.reason


def test_it_is_public():
    assert stagewright.explain is explain


def test_what_another_objective_gave_up_is_not_put_down_to_memory():
    """One device is enough, and four would be faster: no memory is missing for that."""
    profile = chain_profile([1] * 4, parameter_bytes=400, saved_bytes=10)
    cluster = Cluster.uniform(4, memory_bytes=10**6)
    found = plan(profile, cluster, PlanOptions(objective="devices", num_microbatches=8))
    explained = explain(found, profile, cluster)
    again = alternative(explained, "planned again, for the least step")
    assert again.step_time_s < found.step_time_s
    assert explained.bound != "memory"
    more = alternative(explained, "10 % more memory")
    assert more.step_time_s == again.step_time_s
    assert more.saved_s_per_unit == 0
    assert alternative(explained, "links twice as fast").step_time_s <= again.step_time_s


def test_the_fastest_other_schedules_are_planned():
    profile = chain_profile([0.01] * 16)
    made = plan(profile, "4xcpu")
    tried = {
        entry.text.removeprefix("schedule "): entry
        for entry in explain(made, profile, "4xcpu").alternatives
        if entry.text.startswith("schedule ")
    }
    assert len(tried) == 3
    for name, entry in tried.items():
        options = PlanOptions(schedule=name)
        assert entry.step_time_s == plan(profile, "4xcpu", options).step_time_s < made.step_time_s
