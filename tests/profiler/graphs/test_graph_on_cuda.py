"""A graph is measured on the card that is asked for, in all the memory that is free there."""

import sys

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput, MeasurementError
from stagewright.core.graph.graph import Graph
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.graphs.profile_graph import profile_graph
from tests.profiler.cuda_stub import MIB, Card, CudaStub

QUICK = ProfilingOptions(budget_s=0.001, num_threads=1)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with CudaStub(Card(), Card("the second", 64 * MIB)).takes_cpu(1) as stub:
        yield stub


@pytest.fixture
def graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return Graph.from_json(trace(model, torch.ones(4, 8), check=False).graph.to_json())


def test_all_is_asked_of_the_card_that_is_named(stub, graph):
    found = profile_graph(graph, options=QUICK)
    assert stub.devices() == {1}
    assert found.provenance.device_name == "the second"
    assert all(layer.dispatch_forward is not None for layer in found.layers)
    assert any("throttled, could not be read" in note for note in found.notes)


def test_what_earlier_layers_left_in_the_cache_is_free(stub, graph):
    """A layer was refused for want of memory that torch held for it."""
    stub.take(64 * MIB, 1)
    stub.give(64 * MIB, 1)
    assert stub.mem_get_info(torch.device("cuda", 1))[0] == 0
    profile_graph(graph, options=QUICK)
    names = stub.names()
    asked = [at for at, name in enumerate(names) if name == "mem_get_info"][1:]
    assert len(asked) == 2 * 3
    assert all(names[at - 1] == "empty_cache" for at in asked)


def test_a_layer_that_cannot_fit_on_the_card_is_refused(stub, graph):
    stub.take(64 * MIB, 1)
    with pytest.raises(MeasurementError, match=r"0 does not fit: .* and 0 B are free"):
        profile_graph(graph, options=QUICK)


def test_times_are_not_taken_where_every_launch_blocks(stub, graph, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(InvalidInput, match="CUDA_LAUNCH_BLOCKING"):
        profile_graph(graph, options=QUICK)
