"""A rank that shares its stages keeps no whole weights, wherever the model's tracer put them."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.capture.capture import trace
from stagewright.runtime.replicas.shared_weights import WeightPlacement
from stagewright.runtime.replicas.strategy import apply_strategies
from stagewright.runtime.tensor_parallel.exchange import ShardGroup
from stagewright.runtime.tensor_parallel.split_model import divide_weights, split_model
from stagewright.schedules.make_schedule import make_schedule

CPU = torch.device("cpu")


class Net(nn.Module):
    """A table, two layers by columns and by rows, and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


@pytest.fixture(autouse=True, scope="module")
def exported_before():
    """torch keeps the weights of the first model that a process exports."""
    trace(Net(), torch.zeros(3, dtype=torch.long), check=False)


def watch(model):
    """Weak references to the parameters that have several dimensions."""
    return [weakref.ref(weight) for weight in model.parameters() if weight.dim() > 1]


def are_alive(references):
    gc.collect()
    return [reference().shape for reference in references if reference() is not None]


def test_whole_weights_are_freed_once_they_are_divided():
    model = Net()
    references = watch(model)
    captured = trace(model, torch.zeros(3, dtype=torch.long), check=False)
    group = ShardGroup(0, 2, CPU)
    layers = len(captured.layers)
    split = split_model(captured, [2] * layers, [0] * layers, group)
    stage = captured.segment(0, layers)
    assert set(split.divided) >= {"table.weight", "up.weight", "down.weight", "head.weight"}
    before = list(model.parameters())
    divide_weights([stage], split)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {tuple(shape) for shape in are_alive(references)} == {(4, 4)}, "parts"
    assert model.up.weight.shape == (4, 4)
    assert model.down.weight is stage.get_parameter("down.weight")


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_whole_weights_are_freed_once_they_are_sharded(alone):
    model = Net()
    references = watch(model)
    captured = trace(model, torch.zeros(3, dtype=torch.long), check=False)
    stage = captured.segment(0, len(captured.layers), blocks=True)
    schedule = make_schedule("gpipe", 1, 1)
    placement = WeightPlacement(captured.graph.parameters, [len(captured.layers)], schedule)
    made = apply_strategies(
        {0: "fully_shard"}, schedule, {0: stage}, placement, {(0,): alone}, CPU, captured.roots
    )
    assert made
    assert are_alive(references) == []
