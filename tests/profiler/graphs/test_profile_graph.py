"""Measured without its code, layer by layer, a model has the profile it has as a whole."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.capture.capture import trace
from stagewright.capture.program.program import storage_key, tensors_of
from stagewright.core.errors import InvalidInput, MeasurementError
from stagewright.core.graph.graph import Graph
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.graphs import profile_graph as module
from stagewright.profiler.graphs.profile_graph import profile_graph
from stagewright.profiler.layers.saved_storages import Storage
from stagewright.profiler.machine.clock import Clock
from stagewright.profiler.measure.profile import profile
from tests.portable_models import awkward, gpt2, inception, llama, lstm, nested, unet

QUICK = ProfilingOptions(budget_s=0.01, num_threads=1)


def captured(build):
    torch.manual_seed(0)
    model, sample = build()
    graph = trace(model.train(), sample, check=False).graph
    return model, sample, Graph.from_json(graph.to_json())


def table(found):
    return Counter((storage.layers, storage.size_bytes) for storage in found.storages)


@pytest.mark.parametrize(
    "build", [gpt2, llama, unet, lstm, inception, awkward, nested], ids=lambda build: build.__name__
)
def test_everything_but_the_times_is_as_measured_with_the_code(build):
    """Shared and changed storages, dropout, side values, long skips, several uses."""
    model, sample, graph = captured(build)
    ours, theirs = profile_graph(graph, options=QUICK), profile(model, sample, options=QUICK)
    assert table(ours) == table(theirs)
    assert ours.boundaries == theirs.boundaries
    assert ours.edges == theirs.edges
    assert ours.parameters == theirs.parameters
    assert ours.splits == theirs.splits
    assert ours.inputs == theirs.inputs
    assert ours.input_structure == theirs.input_structure
    for found, expected in zip(ours.layers, theirs.layers, strict=True):
        assert found.layer.model_copy(update={"cost_class": ""}) == expected.layer.model_copy(
            update={"cost_class": ""}
        )
        assert found.saved_activation_bytes == expected.saved_activation_bytes
        assert found.output_bytes == expected.output_bytes
        assert found.workspace_bytes == expected.workspace_bytes
        assert (found.backward.median_s > 0) == (expected.backward.median_s > 0)
        assert found.forward.median_s > 0


def test_equal_layers_are_measured_once_with_the_same_storage_table():
    _, _, graph = captured(gpt2)
    told = []
    once = profile_graph(graph, options=QUICK, progress=lambda *m: told.append(m))
    each = profile_graph(graph, options=QUICK.model_copy(update={"deduplicate": False}))
    assert told[-1][1] < len(graph.layers)
    assert table(once) == table(each)
    blocks = [entry for entry in once.layers if entry.layer.name.startswith("transformer.h.")]
    assert len({entry.forward for entry in blocks}) == 1
    assert len({entry.layer.cost_class for entry in blocks}) == 1


class Allocated(TorchDispatchMode):
    """Bytes of real tensors made inside and alive at once, at most."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            if not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
                self.live.setdefault(storage_key(tensor), Storage.of(tensor))
        self.live = {key: storage for key, storage in self.live.items() if storage.is_alive}
        self.peak = max(self.peak, sum(storage.size_bytes for storage in self.live.values()))
        return result


def test_a_model_needs_the_memory_of_one_layer():
    """Parameters, their gradients and a little more of one of sixteen; never of two."""
    width, count, batch = 256, 16, 4
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    graph = trace(model, torch.randn(batch, width), check=False).graph
    del model
    one_layer = 4 * width * (width + 1)
    options = QUICK.model_copy(update={"deduplicate": False})
    with Allocated() as allocated:
        found = profile_graph(graph, options=options)
    assert len(found.layers) == count
    # Weight, its accumulated gradient, and the new gradient on its way to be added.
    assert 2 * one_layer <= allocated.peak <= 3 * one_layer + 32 * 4 * batch * width


def test_a_layer_that_cannot_fit_is_refused_before_it_is_tried(monkeypatch):
    graph = trace(nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64), check=False).graph
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 1000)
    with pytest.raises(MeasurementError, match=r"0 does not fit: it needs .*1000 B are free"):
        profile_graph(graph, options=QUICK)


def test_random_numbers_go_on_as_if_nothing_had_been_measured():
    graph = trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), check=False).graph
    before = torch.get_rng_state()
    profile_graph(graph, options=QUICK)
    assert torch.equal(torch.get_rng_state(), before)


def test_under_autocast():
    graph = trace(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8), check=False).graph
    found = profile_graph(graph, options=QUICK.model_copy(update={"autocast": "bfloat16"}))
    assert found.provenance.autocast == "bfloat16"


def test_gradients_are_on_whatever_the_caller_has():
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8), check=False).graph
    with torch.no_grad():
        assert profile_graph(graph, options=QUICK).storages
    with torch.inference_mode(), pytest.raises(InvalidInput, match="inference mode"):
        profile_graph(graph, options=QUICK)


def test_the_clock_knows_of_busy_neighbours(monkeypatch):
    made = []

    class Told(Clock):
        def __init__(self, device, *, shared=False):
            made.append(shared)
            super().__init__(device, shared=shared)

    monkeypatch.setattr(module, "Clock", Told)
    graph = trace(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8), check=False).graph
    profile_graph(graph, options=QUICK)
    profile_graph(graph, options=QUICK.model_copy(update={"busy_neighbours": 1}))
    assert made == [False, True]


def changed(graph, **fields):
    return graph.model_copy(update=fields)


def test_a_graph_that_contradicts_itself_is_refused():
    graph = trace(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 8), check=False
    ).graph
    boundary = graph.boundaries[0]
    wider = boundary.tensors[0].model_copy(update={"shape": (2, 9)})
    output = graph.operations[1].outputs[0].model_copy(update={"shape": (2, 5)})
    operation = graph.operations[1].model_copy(update={"outputs": (output,)})
    first = graph.layers[0].model_copy(update={"parameter_bytes": 31})
    cases = {
        "says 31 bytes of parameters": changed(graph, layers=(first, *graph.layers[1:])),
        "lists other tensors": changed(
            graph, boundaries=(boundary.model_copy(update={"tensors": (wider,)}),)
        ),
        "but the graph says": changed(graph, operations=(graph.operations[0], operation)),
        "parameters differ": changed(graph, parameters=graph.parameters[1:]),
        "names other inputs": changed(
            graph, input_structure='{"positional": ["x"], "keyword": []}'
        ),
        "does not say how": changed(graph, input_structure='{"positional": 3}'),
    }
    for said, contradictory in cases.items():
        with pytest.raises(InvalidInput, match=said):
            profile_graph(contradictory, options=QUICK)
