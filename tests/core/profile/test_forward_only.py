"""A profile of forwards alone: nothing of training is left, and plans are for forwards."""

from itertools import combinations

import pytest

from stagewright import for_inference, plan
from stagewright.core.plan.plan import PlanOptions
from tests.builders import chain_profile, random_profile


@pytest.mark.parametrize("seed", range(5))
def test_what_only_training_has_is_gone(seed):
    whole = random_profile(seed, 6)
    found = for_inference(whole)
    assert [e.forward for e in found.layers] == [e.forward for e in whole.layers]
    assert not any(e.backward.median_s or e.saved_activation_bytes for e in found.layers)
    assert not any(each.backward_bytes for each in found.boundaries)
    assert [b.forward_bytes for b in found.boundaries] == [
        b.forward_bytes for b in whole.boundaries
    ]
    assert found.storages == ()
    assert found.loss is None
    made = plan(found, "2x80GB", PlanOptions(objective="throughput", schedule="gpipe"))
    for stage in made.stages:
        memory = stage.memory
        assert memory.gradients_bytes == memory.optimizer_bytes == memory.activations_bytes == 0
        assert stage.backward_time_s == stage.sync_time_s == stage.send_backward_time_s == 0


def test_a_stream_is_cut_by_forwards():
    """The training plan keeps the first layer alone for its backward; the other balances F."""
    forward = (1.0, 1.0, 2.0, 4.0, 1.0)
    whole = chain_profile(forward, (20.0, 1.0, 1.0, 1.0, 1.0))
    options = PlanOptions(objective="throughput", schedule="gpipe", num_stages=3)
    made = plan(for_inference(whole), "3x80GB", options)
    least = min(
        max(sum(forward[:a]), sum(forward[a:b]), sum(forward[b:]))
        for a, b in combinations(range(1, 5), 2)
    )
    assert made.proof.value == pytest.approx(least)
    assert max(stage.forward_time_s for stage in made.stages) == least
    assert plan(whole, "3x80GB", options).balance[0] == 1 != made.balance[0]
