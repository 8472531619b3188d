"""torchgpipe's call shape, answered exactly and repeatably."""

import itertools

import pytest
import torch
from torch import nn

import stagewright
from stagewright.balance import balance_profile
from stagewright.core.errors import InvalidInput
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.measure.profile import profile
from tests.torch_models import make_case


def test_balance_by_time_and_size_return_layer_counts():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    sample = torch.randn(8, 16)
    for balance in (
        stagewright.balance_by_time(3, model, sample, timeout=0.01),
        stagewright.balance_by_size(3, model, sample, chunks=4, param_scale=4.0),
    ):
        assert len(balance) == 3
        assert sum(balance) == 6


def test_a_heavy_layer_gets_a_partition_of_its_own():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 4096))
    assert stagewright.balance_by_size(2, model, torch.randn(2, 4)) == [5, 1]


def test_the_same_profile_gives_the_same_and_the_best_answer():
    case = make_case("resnet")
    found = profile(case.model, case.sample, options=ProfilingOptions(budget_s=0.01))
    costs = [entry.forward.median_s + entry.backward.median_s for entry in found.layers]
    answers = {tuple(balance_profile(found, 3)) for _ in range(5)}
    assert len(answers) == 1
    (balance,) = answers

    def largest(cuts):
        edges = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    cuts = tuple(itertools.accumulate(balance))[:-1]
    best = min(largest(option) for option in itertools.combinations(range(1, len(costs)), 2))
    assert largest(cuts) == pytest.approx(best, rel=1e-12)


def test_more_partitions_than_layers_is_refused():
    with pytest.raises(InvalidInput):
        stagewright.balance_by_size(3, nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2))
