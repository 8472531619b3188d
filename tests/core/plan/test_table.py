"""The table a plan prints."""

import re

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.plan.table import format_plan, format_proof, format_verdict
from stagewright.core.units import format_time
from stagewright.planner.plan import plan as make_plan
from stagewright.planner.price_split import plan_from_balance
from tests.builders import chain_profile, random_profile


def test_the_whole_table():
    profile = chain_profile([0.01, 0.01, 0.03], parameter_bytes=4096, forward_bytes=2048)
    cluster = Cluster.uniform(2, memory_bytes=2**20, latency_s=0, bandwidth_bytes_per_s=2048e3)
    made = make_plan(profile, cluster, PlanOptions(num_microbatches=4, optimizer="sgd"))
    assert str(made).splitlines() == [
        "stage  device    layers  forward  backward  in flight    memory    limit  used  sends on  "
        "sends back  from     to",
        "-----  --------  ------  -------  --------  ---------  --------  -------  ----  --------  "
        "----------  -------  -------",
        "    0  device:0       2    20 ms     40 ms          2  20.0 KiB  1.0 MiB    2%   2.0 KiB  "
        "       0 B  layer.0  layer.1",
        "    1  device:1       1    30 ms     60 ms          1  12.0 KiB  1.0 MiB    1%       0 B  "
        "   2.0 KiB  layer.2  layer.2",
        "",
        "step time 422 ms (1f1b, 4 micro-batches, MEASURED profile), bubble 28.9%",
        "precision fp32 with sgd: 8 bytes a parameter (weights 4, gradients 4)",
        "equal layer counts [2, 1]: 422 ms; this plan takes the same time",
        "even times [2, 1]: 422 ms; this plan takes the same time",
        "proof: optimal",
    ]
    assert format_plan(made, details=True).splitlines()[-2:] == [
        "proof: optimal",
        "proof: simulated step time: 422 ms, optimal",
    ]


def columns(plan, line=0):
    return re.split(r"\s{2,}", str(plan).splitlines()[line].strip())


def test_replicas_and_recomputation_have_columns_where_there_are_any():
    profile = random_profile(3, 12)
    plain = make_plan(profile, "1x24GB")
    assert not {"replicas", "recompute", "sync"} & set(columns(plain))
    options = PlanOptions(num_microbatches=32, max_replicas=None, recompute="always")
    made = make_plan(profile, "4x24GB", options)
    cells = dict(zip(columns(made), columns(made, 2), strict=True))
    stage = made.stages[0]
    assert cells["replicas"] == str(stage.replicas) == "4"
    assert cells["recompute"] == stage.recompute == "always"
    assert cells["in flight"] == str(stage.in_flight)
    assert cells["sync"] == format_time(stage.sync_time_s)
    assert cells["device"] == "24GB:0..24GB:3"


def with_proof(plan, **changes):
    return plan.model_copy(update={"proof": plan.proof.model_copy(update=changes)})


def test_the_proof_in_words_claims_no_more_than_is_known():
    made = make_plan(chain_profile([0.01, 0.01, 0.03]), "2xcpu")
    near = with_proof(made, status="feasible", value=3.0, lower_bound=2.99999)
    assert "3 s, at most 0.1 % above the best possible (3 s)" in format_proof(near)[0]
    unknown = made.with_bounds(0.0, 0.0)
    assert format_verdict(unknown) == "no lower bound known"
    bounded = made.with_bounds(made.step_time_s / 1.1, 0.0)
    assert format_verdict(bounded) == "at most 10.0 % above the best possible"
    assert format_verdict(made.with_bounds(made.step_time_s, 0.0)) == "optimal"


def test_another_objective_s_proof_adds_a_line_on_the_step():
    options = PlanOptions(objective="throughput")
    made = make_plan(chain_profile([0.01, 0.01, 0.03]), "2xcpu", options)
    assert "simulated step" not in format_proof(made.with_bounds(0.0, 0.0))[-1]
    met = made.with_bounds(0.0, made.step_time_s)
    assert "simulated step equal to the lower bound" in format_proof(met)[-1]


@pytest.mark.parametrize(
    ("objective", "said"), [("memory", r"device: \d+\.\d KiB"), ("devices", "devices used: 1")]
)
def test_a_value_has_the_unit_of_its_objective(objective, said):
    made = make_plan(random_profile(3, 12), "8x24GB", PlanOptions(objective=objective))
    assert re.search(said, format_plan(made, details=True))
    assert "no plan can beat" not in str(made)


def test_long_balances_are_cut_short_and_notes_are_told():
    made = make_plan(
        chain_profile([1] * 40), "20xcpu", PlanOptions(num_microbatches=64, num_stages=20)
    )
    assert "equal layer counts [2, 2, 2, 2, 2, 2, 2, 2, ... 20 stages]" in str(made)
    noted = made.model_copy(update={"notes": ("a guess was made",)})
    assert str(noted).splitlines()[-1] == "note: a guess was made"


def test_gain_and_loss_against_equal_layer_counts():
    profile, cluster = chain_profile([1, 1, 1, 9]), Cluster.uniform(2)
    slower = plan_from_balance(profile, cluster, None, [1, 3])
    assert "equal layer counts [2, 2]: 246 s; this plan is 8.5% slower" in str(slower)
    heavy_front = chain_profile([9, 1, 1, 1])
    assert "this plan is 11.1% faster" in str(make_plan(heavy_front, cluster, num_microbatches=8))


@pytest.mark.parametrize(
    ("step_time_s", "other_s", "said"),
    [
        (1.0, 5.831, "is 5.8 times as fast"),
        (5.831, 1.0, "takes 5.8 times as long"),
        (1.0, 2.0, "is 2.0 times as fast"),
        (1.0, 1.999, "is 99.9% faster"),
        (1.0, 1.0004, "takes the same time"),
        (0.0, 1.0, "takes the same time"),
    ],
)
def test_from_twice_the_time_on_multiples_are_told(step_time_s, other_s, said):
    """Cause: "483.1% faster" is read as 4.8 times as fast."""
    made = plan_from_balance(chain_profile([1, 1, 1, 9]), Cluster.uniform(2), None, [1, 3])
    other = made.baselines[0].model_copy(update={"step_time_s": other_s})
    told = made.model_copy(update={"step_time_s": step_time_s, "baselines": (other,)})
    assert f"; this plan {said}\n" in str(told)


def test_without_a_limit_none_is_shown():
    assert " none " in str(make_plan(chain_profile([1, 1]), Cluster.uniform(2)))


def test_names_cannot_break_the_table():
    """Cause: a layer called with a line end in its name split a row in two."""
    profile = chain_profile([1, 1])
    names = ["a\nb", "c\x1b[31md"]
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, names, strict=True)
    )
    lines = str(make_plan(profile.model_copy(update={"layers": layers}), "2xcpu")).splitlines()
    assert lines[2].split()[-2:] == ["a\\nb", "a\\nb"]
    assert lines[3].endswith(r"c\x1b[31md")
    assert lines[4] == ""
