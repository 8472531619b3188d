"""A layer's peak on CUDA is the allocator's, of the layer alone and of its device."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import OutOfMemory
from stagewright.profiler.layers.first_run import first_run
from stagewright.profiler.layers.layer_run import layer_runs
from stagewright.profiler.layers.memory_run import PeakMemory
from stagewright.profiler.layers.trace_model import make_gradients
from tests.profiler.cuda_stub import MIB, Card, CudaStub, Scratch


@pytest.fixture
def stub():
    """Two cards, of which CPU tensors are on the second, and the first is current."""
    with CudaStub(Card(), Card(total_memory=1024 * MIB)).takes_cpu(1) as stub:
        yield stub


def run_first(stub, layer, fails_at=0):
    """Run a linear layer and one behind it, for the first time since they were captured."""
    model, x = nn.Sequential(nn.Linear(8, 8), layer), torch.ones(4, 8)
    captured = trace(model, x, check=False)
    stub.calls.clear()
    layer.run.calls, layer.run.fails_at = 0, fails_at
    runs = layer_runs(captured)
    make_gradients(runs)
    inputs = dict(zip(captured.program.inputs, [x], strict=True))
    return first_run(model, runs, inputs, len(runs), nullcontext)


def test_the_cache_is_emptied_before_a_peak_and_all_is_asked_of_its_device(stub):
    peak = PeakMemory(torch.device("cuda", 1))
    assert stub.calls == [("empty_cache", None), ("reset_peak", 1)]
    stub.take(3 * MIB, 1)
    stub.give(2 * MIB, 1)
    stub.take(5 * MIB, 0)
    assert (peak.peak_bytes, peak.live_bytes()) == (3 * MIB, MIB)
    assert peak.restart_peak() == MIB
    assert peak.peak_bytes == MIB
    assert stub.devices() == {1}
    # Before each peak, the forward's and the backward's.
    peaks = [name for name in stub.names() if name != "read_peak"]
    assert peaks == ["empty_cache", "reset_peak"] * 2


def test_what_was_taken_and_what_was_reserved_for_it_are_noted(stub):
    peak = PeakMemory(torch.device("cuda", 1))
    stub.take(3 * MIB, 1)
    stub.cards[1].reserved_peak = 20 * MIB
    (note,) = peak.notes()
    assert "3.0 MiB allocated" in note
    assert "20.0 MiB reserved" in note
    assert PeakMemory(torch.device("meta")).notes() == ()


def test_what_only_a_first_call_allocates_is_not_the_layers(stub):
    """cuBLAS's workspaces were charged to whichever layer multiplied first."""
    stub.current = 1
    layer = Scratch(stub, 2 * MIB, lasting=32 * MIB)
    assert run_first(stub, layer).workspace_bytes == [0, 2 * MIB]


def test_each_peak_is_of_an_empty_cache(stub):
    stub.current = 1
    run_first(stub, Scratch(stub, MIB))
    peak = [("empty_cache", None), ("reset_peak", 1), ("read_peak", 1)]
    # Forwards and backwards, twice for each of two layers: the first time warms up.
    assert stub.calls == peak * 2 * 2 * 2


def test_a_layer_that_does_not_fit_is_named_with_the_memory_of_its_device(stub):
    stub.current = 1
    with pytest.raises(OutOfMemory, match=r"out of memory in 1: .*GPU 1 has") as caught:
        run_first(stub, Scratch(stub, MIB), fails_at=2)
    assert caught.value.layer == "1"
    assert caught.value.available_bytes == 1024 * MIB
