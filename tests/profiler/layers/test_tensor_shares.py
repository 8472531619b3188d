"""Splits in profiles against what ranks exchange and hold when a model is split over them."""

import copy
from collections import Counter

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.profiler.layers.tensor_shares import _work_of, find_shares, list_splits
from tests.capture.splitting.threads import Threads, run_split
from tests.runtime.tensor_parallel.models import make_example


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnext"])
def test_collectives_and_bytes_are_those_of_ranks(name):
    example = make_example(name)
    captured = trace(copy.deepcopy(example.model), example.sample, check=False)
    shares = find_shares(captured)[2].layers
    ranks = Threads(2)
    _, _, divided = run_split(example.model, tuple(example.sample.values()), 2, ranks)
    for kinds, fields in (
        (["add"], ["reduced", "entered"]),
        (["join", "add_part"], ["gathered", "returned"]),
    ):
        expected = Counter(s for share in shares for field in fields for s in getattr(share, field))
        seen = Counter()
        for (kind, size), count in ranks.seen.items():
            seen[size] += count if kind in kinds else 0
        assert +seen == expected, kinds
    weights = dict(example.model.named_parameters())
    assert sum(weights[key].nbytes for key in divided) == sum(
        record.size_bytes
        for record in captured.graph.parameters
        if not divided.isdisjoint(record.names)
    )
    # A tied table counts in both of its layers.
    assert sum(share.divided_bytes for share in shares) >= sum(weights[k].nbytes for k in divided)


def test_what_ranks_hold_adds_up_to_the_layer():
    from stagewright.core.profile.profile import LayerProfile, Timing

    example = make_example("llama")
    captured = trace(example.model, example.sample, check=False)
    shares = find_shares(captured)
    assert set(shares) == {2, 4, 8}
    layers = [
        LayerProfile(
            layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2),
            saved_activation_bytes=1001,
        )
        for layer in captured.graph.layers
    ]  # fmt: skip
    for split in list_splits(shares, layers):
        for own, entry, share in zip(
            split.layers, layers, shares[split.degree].layers, strict=True
        ):
            whole = entry.layer.parameter_bytes - share.divided_bytes
            parts = split.degree * (own.parameter_bytes - whole)
            assert share.divided_bytes <= parts < share.divided_bytes + split.degree
            assert 1 / split.degree <= own.compute_share <= 1
            assert 1001 / split.degree <= own.saved_activation_bytes <= 1001


def test_nothing_is_said_of_a_model_without_products():
    captured = trace(torch.nn.Sequential(torch.nn.ReLU()), (torch.randn(2, 3),), check=False)
    assert find_shares(captured) == {}


def test_views_are_no_work():
    class Transposed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (torch.nn.Parameter(torch.ones(2, 4, 4)) for _ in "ab")

        def forward(self, x):
            return x @ self.up[0].t() @ self.down[0].t()

    captured = trace(Transposed(), (torch.randn(2, 4),), check=False)
    works = {node.name: _work_of(node, captured.program) for node in captured.layers.layer_of}
    products = [work for name, work in works.items() if name.startswith("matmul")]
    assert len(products) == 2
    assert sum(works.values()) == sum(products) > 0
