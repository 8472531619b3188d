"""What memory a graph takes is known before it is taken."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import MeasurementError
from stagewright.core.graph.graph import Graph
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.graphs import boundary_inputs as inputs
from stagewright.profiler.graphs import profile_graph as module
from stagewright.profiler.graphs.memory_needed import within_budget
from stagewright.profiler.graphs.profile_graph import profile_graph
from stagewright.profiler.graphs.rebuilt_capture import rebuild_captured

QUICK = ProfilingOptions(budget_s=0.01, num_threads=1)
FREE_BYTES = 100_000


class ReadsBuffer(nn.Module):
    """A layer of 80 bytes of parameters, and a buffer twice as large as the memory there is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(2 * FREE_BYTES / 4))

    def forward(self, x):
        return self.fc(x) + self.table[:4]


class Positions(nn.Module):
    """Positions, then a mask that follows from them, read by the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.zeros_like(x)
        mask.add_(1)
        return self.second(self.first(x * mask)) * mask


def graph_of(model):
    return Graph.from_json(trace(model, torch.randn(2, 4), check=False).graph.to_json())


def test_a_buffer_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    """Only parameters and what crosses boundaries used to be counted, and after making values."""
    graph = graph_of(ReadsBuffer())
    monkeypatch.setattr(module, "free_memory_bytes", lambda: FREE_BYTES)
    monkeypatch.setattr(inputs, "made_up", lambda *_: pytest.fail("it was made"))
    with pytest.raises(MeasurementError, match=r"does not fit: it needs .*buffers and constants"):
        profile_graph(graph, options=QUICK)


def test_values_are_computed_as_far_as_the_budget_goes():
    program = rebuild_captured(graph_of(Positions()), torch.device("cpu")).captured.program
    nodes = {node.name: node for node in program.graph.nodes}
    zeros, added = (nodes[name] for name in ("zeros_like", "add_"))
    mask_bytes = 2 * 4 * 4
    order = [zeros, added]
    assert within_budget(order, program.inputs, {added}, mask_bytes) == order
    assert within_budget(order, program.inputs, {zeros}, mask_bytes) == order  # changed in place
    assert within_budget(order, program.inputs, {added}, mask_bytes - 1) == []
    assert within_budget(order, program.inputs, set(), mask_bytes) == []
