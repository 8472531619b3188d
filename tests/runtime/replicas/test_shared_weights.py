"""Ranks that hold the same weights are connected before they train."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from stagewright.runtime.replicas.shared_weights import WeightPlacement
from stagewright.schedules.make_schedule import make_schedule


def test_replicas_of_a_stage_without_weights_are_connected_too(monkeypatch):
    """NCCL would connect them in the first step, while other ranks wait for one of them."""
    placement = WeightPlacement([], [1], make_schedule("gpipe", 1, 2, replicas=[2]))
    groups = {(0, 1): mock.sentinel.group}
    ranks = mock.Mock(create_groups=lambda wanted: {each: groups[each] for each in wanted})
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor, group)))
    found = placement.broadcast_initial_values(nn.ReLU(), ranks, torch.device("meta"))
    assert found == groups
    assert [(tensor.device.type, group) for tensor, group in summed] == [
        ("meta", mock.sentinel.group)
    ]
