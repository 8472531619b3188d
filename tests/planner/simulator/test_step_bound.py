"""Bounds on the simulated step against the simulator."""

import numpy as np
import pytest

from stagewright.planner.simulator.simulate import StageTimes, step_time
from stagewright.planner.simulator.step_bound import StageColumns, bound_steps
from stagewright.schedules.action_order import default_depths
from tests.planner.random_pipelines import random_pipeline


def bound_s(name, times, num_microbatches, replicas, depths=()):
    """The bound on one plan; equal replicas of zero_bubble are pipelines of their own."""
    m = num_microbatches
    if name == "zero_bubble":
        m, replicas = -(-m // replicas[0]), [1] * len(replicas)
    depths = depths or default_depths(m, replicas)
    stages = times.num_stages
    whole_s, weights_s = times.backward_s, [0.0] * stages
    if name == "zero_bubble":
        _, _, inputs, weights, _ = times.work_s.reshape(5, stages).tolist()
        whole_s, weights_s = (
            [one + other for one, other in zip(inputs, weights, strict=True)],
            weights,
        )

    def row(values, dtype=float):
        found = np.zeros((1, stages), dtype)
        found[0, : len(values)] = values
        return found

    plans = StageColumns(
        row(times.forward_s), row(whole_s), row(times.send_forward_s),
        row(times.send_backward_s), row(times.sync_s), row(replicas, np.int64),
        row(depths, np.int64), np.zeros(1), replicas[-1], row(weights_s),
    )  # fmt: skip
    return float(bound_steps(name, m, plans)[0])


def test_no_step_is_below_its_bound():
    ratios = []
    for seed in range(1_500):
        name, times, m, replicas, depths, _ = random_pipeline(
            seed, ("gpipe", "1f1b", "zero_bubble")
        )
        if len(times.recompute_s) or times.skips or times.tied_sync_s or times.shares_channels:
            continue
        own = depths if depths else default_depths(m, replicas)
        step_s, _ = step_time(name, times, m, replicas, depths)
        least_s = bound_s(name, times, m, replicas, own if name == "1f1b" else ())
        assert least_s <= step_s * (1 + 1e-9), seed
        ratios.append(least_s / step_s if step_s else 1.0)
    assert len(ratios) > 100
    assert np.median(ratios) > 0.98


@pytest.mark.parametrize("send_s", [0.0, 0.05, 0.5, 3.0])
def test_slow_links_are_in_the_steady_state(send_s):
    """A turn of four stages there and back, or a channel's messages, bound each micro-batch."""
    times = StageTimes([1.0] * 4, [2.0] * 4, [send_s] * 3, [send_s] * 3)
    step_s, _ = step_time("1f1b", times, 64)
    assert bound_s("1f1b", times, 64, [1] * 4) == pytest.approx(step_s, rel=0.04)
