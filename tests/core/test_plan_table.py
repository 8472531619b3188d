"""The table a plan prints."""

from stagewright.core.cluster import Cluster
from stagewright.core.plan import PlanOptions
from stagewright.planner.from_balance import plan_from_balance
from stagewright.planner.plan import plan
from tests.builders import chain_profile


def test_the_whole_table():
    profile = chain_profile([0.01, 0.01, 0.03], parameter_bytes=4096, forward_bytes=2048)
    cluster = Cluster.uniform(2, memory_bytes=2**20, latency_s=0, bandwidth_bytes_per_s=2048e3)
    made = plan(profile, cluster, PlanOptions(num_microbatches=4, optimizer="sgd"))
    assert str(made).splitlines() == [
        "stage  device    layers  forward  backward  memory    limit    used  sends    from     to",
        "-----  --------  ------  -------  --------  --------  -------  ----  -------  -------"
        "  -------",
        "0      device:0  2       20 ms    40 ms     24.0 KiB  1.0 MiB  2%    2.0 KiB  layer.0"
        "  layer.1",
        "1      device:1  1       30 ms    60 ms     16.0 KiB  1.0 MiB  2%    2.0 KiB  layer.2"
        "  layer.2",
        "",
        "step time 422 ms (1f1b, 4 micro-batches, MEASURED profile), bubble 28.9%",
        "equal layer counts [2, 1]: 422 ms; this plan takes the same time",
        "proof: optimal by the 1F1B model step time, sum + (m - 1) x slowest stage, 422 ms, which "
        "no split has below 422 ms (gap 0.00%); the step time above is simulated",
    ]


def test_gain_and_loss_against_equal_layer_counts():
    profile, cluster = chain_profile([1, 1, 1, 9]), Cluster.uniform(2)
    slower = plan_from_balance(profile, cluster, None, [1, 3])
    assert "equal layer counts [2, 2]: 246 s; this plan is 8.5% slower" in str(slower)
    heavy_front = chain_profile([9, 1, 1, 1])
    assert "this plan is 11.1% faster" in str(plan(heavy_front, cluster, num_microbatches=8))


def test_without_a_limit_none_is_shown():
    assert " none " in str(plan(chain_profile([1, 1]), Cluster.uniform(2)))
