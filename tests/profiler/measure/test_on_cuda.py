"""A profile on CUDA, on a stand-in for the second of two cards, while the first is current."""

import sys
import weakref
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput, OutOfMemory
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.measure.profile import _check_device, profile
from tests.profiler.cuda_stub import MIB, SLICE, TICK_S, Card, CudaStub, Scratch
from tests.state_checks import snapshot

QUICK = ProfilingOptions(budget_s=0.001, num_threads=1)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with CudaStub(Card(), Card("the second", 1024 * MIB)).takes_cpu(1) as stub:
        yield stub


def build(stub):
    torch.manual_seed(0)
    scratch = Scratch(stub, 2 * MIB)
    model = nn.Sequential(nn.Linear(8, 8), scratch, nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].bias.grad = torch.full((8,), 0.25)
    return model, scratch


SAMPLE = torch.ones(4, 8)


def test_everything_is_asked_of_the_device_of_the_model(stub):
    """Events were recorded on the current card: its times were of nothing."""
    model, _ = build(stub)
    found = profile(model, SAMPLE, options=QUICK)
    assert stub.devices() == {1}
    assert stub.current == 0
    assert found.provenance.device_name == "the second"
    for layer in found.layers:
        assert layer.forward.median_s == pytest.approx(TICK_S)
        assert layer.dispatch_forward.median_s > 0


def test_no_event_is_read_within_a_pass_and_each_phase_begins_idle(stub):
    """The stub refuses to read an event that was not waited for."""
    profile(build(stub)[0], SAMPLE, options=QUICK)
    names = stub.names()
    starts = [at for at, name in enumerate(names) if name == "sleep"]
    assert starts
    for at in starts:
        assert names[at - 1 : at + 3] == ["synchronize", "sleep", "record", "record"]
    reading = [
        list(run) for is_read, run in groupby(names, {"wait", "read"}.__contains__) if is_read
    ]
    # All phases of a pass together: at least the forward and the backward of the whole model.
    assert min(map(len, reading)) == 2 * 2


def test_allocated_and_reserved_memory_and_an_unknown_clock_are_noted(stub):
    found = profile(build(stub)[0], SAMPLE, options=QUICK)
    (memory,) = [note for note in found.notes if "reserved" in note]
    assert "2.0 MiB allocated at most, and 2.0 MiB reserved" in memory
    assert any("throttled, could not be read" in note for note in found.notes)
    assert found.provenance.clocks is None
    # Emptied for both peaks of both runs of each layer for memory, and for the timed passes.
    assert stub.names().count("empty_cache") == 4 * len(found.layers) + 1


def test_a_slice_is_measured_as_what_it_is(stub):
    stub.cards = [SLICE]
    stub.of_cpu = 0
    found = profile(build(stub)[0], SAMPLE, options=QUICK)
    assert found.provenance.device_name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def test_times_are_not_taken_where_every_launch_blocks(stub, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    profile(build(stub)[0], SAMPLE, options=QUICK)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    stub.calls.clear()
    with pytest.raises(InvalidInput, match="CUDA_LAUNCH_BLOCKING") as refused:
        profile(build(stub)[0], SAMPLE, options=QUICK)
    assert refused.value.field == "/profiling/device"
    assert stub.calls == []


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_layer_that_runs_out_of_memory_is_named_and_leaves_nothing_behind(stub, after):
    """At first, or in the timed passes: cache emptied, gradients and buffers as they were."""
    model, scratch = build(stub)
    profile(model, SAMPLE, options=QUICK)
    whole = scratch.run.calls
    model, scratch = build(stub)
    before = snapshot(model)
    scratch.run.fails_at = whole * after // 7
    stub.calls.clear()
    with pytest.raises(OutOfMemory, match="out of memory in") as caught:
        profile(model, SAMPLE, options=QUICK)
    assert caught.value.available_bytes == 1024 * MIB
    assert snapshot(model) == before
    assert "empty_cache" in stub.names()
    assert stub.cards[1].reserved == stub.cards[1].allocated == 0
    assert stub.current == 0
    # What comes next finds the memory free, and is measured as if nothing had been.
    scratch.run.fails_at = 0
    assert profile(model, SAMPLE, options=QUICK).layers[1].workspace_bytes >= 2 * MIB


class Large(nn.Module):
    """A layer that runs out of memory once, and notes later whether what it held then is there."""

    def __init__(self):
        super().__init__()

        def run():
            held = Card()
            if not run.first:
                run.first.append(weakref.ref(held))
                raise torch.OutOfMemoryError("CUDA out of memory")
            run.is_held.append(run.first[0]() is not None)

        run.first, run.is_held = [], []
        self.run = run

    def forward(self, x):
        self.run()
        return x * 2


def test_the_layer_to_name_is_sought_in_memory_that_the_failed_run_gave_back(stub):
    """Layers were blamed that had no room beside the activations of the run that failed."""
    layer = Large()
    with pytest.raises(OutOfMemory, match="out of memory in the whole model"):
        profile(nn.Sequential(nn.Linear(8, 8), layer), SAMPLE, options=QUICK)
    assert layer.run.is_held
    assert not any(layer.run.is_held)


def on_devices(*names):
    """As much of a model as is looked at: tensors of a CPU cannot be on a GPU."""
    tensors = [SimpleNamespace(device=torch.device(name)) for name in names]
    return SimpleNamespace(parameters=lambda: tensors[:1], buffers=lambda: tensors[1:])


def test_another_gpu_than_the_models_is_not_measured_in_its_place():
    """Asked for cuda:1, a model on cuda:0 was measured where it was."""
    model, first = on_devices("cuda:0"), torch.device("cuda", 0)
    for wanted in (None, "cuda", "cuda:0"):
        _check_device(model, first, wanted)
    with pytest.raises(InvalidInput, match=r"model is on cuda:0, .* ask for cuda:1"):
        _check_device(model, first, "cuda:1")


def test_a_model_on_two_gpus_is_refused():
    """It was timed by the events of one, which know nothing of the other."""
    first = torch.device("cuda", 0)
    _check_device(on_devices("cuda:0", "cpu"), first, None)
    with pytest.raises(InvalidInput, match="on cuda:0 and cuda:1; move it to one"):
        _check_device(on_devices("cuda:0", "cuda:1", "cuda:0"), first, None)
