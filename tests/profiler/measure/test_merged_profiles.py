"""Measured profiles at two micro-batch sizes say what a third one keeps and sends."""

from itertools import combinations

import pytest
import torch
from torch import nn

from stagewright.core.profile.merge import merge
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.measure.profile import profile

CASES = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(576, 10),
        ),
        lambda samples: torch.randn(samples, 3, 16, 16),
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Linear(32, 3)
        ),
        lambda samples: torch.randn(samples, 9, 32),
    ),
}  # fmt: skip


def held_bytes(found, first, last):
    inside = set(range(first, last))
    return sum(entry.size_bytes for entry in found.storages if inside & {*entry.layers})


@pytest.mark.parametrize("name", CASES)
def test_bytes_between_two_sizes_are_those_measured_there(name):
    torch.manual_seed(0)
    build, sample = CASES[name]
    model = build()
    options = ProfilingOptions(budget_s=0.01)
    measured = {size: profile(model, sample(size), options=options) for size in (2, 4, 8)}
    found, exact = merge([measured[2], measured[8]], samples=4), measured[4]
    assert (found.inputs, found.boundaries, found.edges) == (
        exact.inputs,
        exact.boundaries,
        exact.edges,
    )
    for first, last in combinations(range(len(exact.layers) + 1), 2):
        assert held_bytes(found, first, last) == held_bytes(exact, first, last)
    for one, other in zip(found.layers, exact.layers, strict=True):
        assert one.output_bytes == other.output_bytes
        low, high = sorted(
            entry.layers[found.layers.index(one)].forward.median_s
            for entry in (measured[2], measured[8])
        )
        assert low <= one.forward.median_s <= high
