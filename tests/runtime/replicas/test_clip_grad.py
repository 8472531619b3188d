"""Gradients that ranks hold shards of are clipped by the norm of the whole gradient."""

import json

import pytest

from stagewright.core.errors import NonFinite
from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def test_two_ranks_clip_by_the_norm_of_both_shards(forking_executable):
    """Each scaled its shard by another factor."""
    worker = "tests.runtime.sharded_clipping_worker"
    output = run_as_on_nccl(forking_executable, worker, timeout_s=100)
    found = [json.loads(line) for line in output.splitlines()]
    assert {each["rank"] for each in found} == {0, 1}
    for each in found:
        assert each["norm"] == pytest.approx(50**0.5)
        clipped = [value * 50**0.5 for row in each["clipped"] for value in row]
        assert clipped == pytest.approx([3, 3, 4, 4], rel=1e-5)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_no_weight_is_changed_by_gradients_that_are_not_finite(norm):
    from stagewright.runtime.replicas.clip_grad import clipping_factor  # imports torch

    with pytest.raises(NonFinite, match="no weight was changed"):
        clipping_factor(norm, 1.0)
