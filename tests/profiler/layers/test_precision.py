"""Layers run under autocast or compiled when asked, and the profile says so."""

import pytest
import torch
from torch import nn

from stagewright.capture.program.program import storage_key
from stagewright.core.errors import MeasurementError
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.measure.profile import profile
from tests.state_checks import snapshot

SAMPLE = torch.linspace(-1, 1, 12).reshape(3, 4)


class Look(nn.Module):
    """Notes the type of what it is given, outside of the model."""

    def __init__(self, seen):
        super().__init__()
        self.look = lambda x: seen.append(x.dtype)

    def forward(self, x):
        self.look(x)
        return x


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_layers_run_under_autocast(name):
    seen = []
    model = nn.Sequential(nn.Linear(4, 8), Look(seen), nn.Linear(8, 2))
    options = ProfilingOptions(budget_s=0.001, num_threads=1)
    plain = profile(model, SAMPLE, options=options)
    assert set(seen) == {torch.float32}
    seen.clear()
    before = snapshot(model)
    found = profile(model, SAMPLE, options=options.model_copy(update={"autocast": name}))
    assert seen[-1] == getattr(torch, name)
    assert found.provenance.autocast == name
    assert found.layers[1].output_bytes * 2 == plain.layers[1].output_bytes
    assert snapshot(model) == before
    assert not torch.is_autocast_enabled("cpu")


class Cast(nn.Module):
    """Goes back to the type it had, and does more work if there is autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.first(x)
        hidden = (hidden.float() * 2).to(hidden.dtype)
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.sin().sin()
        return self.second(hidden)


@pytest.mark.parametrize("build", [Cast, lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))])
def test_what_is_described_is_the_model_under_autocast(build):
    """Captured without autocast it would have single precision at its cuts, and no branch."""
    model = build()
    options = ProfilingOptions(budget_s=0.001, num_threads=1, autocast="bfloat16")
    found = profile(model, SAMPLE, options=options)
    (boundary,) = found.boundaries
    assert [tensor.dtype for tensor in boundary.tensors] == ["bfloat16"]
    assert boundary.forward_bytes == found.layers[0].output_bytes == 2 * 3 * 8
    assert [edge.tensor.dtype for edge in found.edges] == ["float32", "bfloat16"]
    kept = {}

    def pack(tensor):
        if storage_key(tensor) not in resident:
            kept[storage_key(tensor)] = tensor
        return tensor

    resident = {storage_key(tensor) for tensor in (*model.parameters(), SAMPLE)}
    weights = [p for p in model.parameters() if p.dim() == 2]
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16), saved:
        model(SAMPLE)
    # Weights are converted once a step, and are no micro-batch's own.
    total = sum(
        tensor.untyped_storage().nbytes()
        for tensor in kept.values()
        if not any(tensor.numel() == weight.numel() for weight in weights)
    )
    assert sum(entry.size_bytes for entry in found.storages) == total


@pytest.mark.parametrize("name", [None, "bfloat16"])
def test_autocast_around_the_call_changes_nothing(name):
    model = Cast()
    options = ProfilingOptions(budget_s=0.001, num_threads=1, autocast=name)
    alone = profile(model, SAMPLE, options=options)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = profile(model, SAMPLE, options=options)
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert inside.storages == alone.storages
    assert inside.boundaries == alone.boundaries


class Compiled:
    """Stands in for ``torch.compile``: counts what is compiled, and runs of it."""

    def __init__(self):
        self.compiled, self.ran = 0, 0

    def __call__(self, function):
        self.compiled += 1

        def run(*given):
            self.ran += 1
            return function(*given)

        return run


def test_every_layer_is_compiled_before_it_is_timed(monkeypatch):
    compiler = Compiled()
    monkeypatch.setattr(torch, "compile", compiler)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    before = snapshot(model)
    options = ProfilingOptions(budget_s=0.001, num_threads=1, compile=True)
    found = profile(
        model,
        SAMPLE,
        options=options,
        loss_fn=nn.functional.cross_entropy,
        target=torch.tensor([0, 1, 0]),
    )
    assert compiler.compiled == 3
    repeats = sum(layer.forward.repeats for layer in found.layers)
    assert compiler.ran == 3 + 3 + repeats  # compiling, a cold pass, passes
    # The same compiled layers run in a row would be compared with themselves.
    assert found.reconciliation is None
    assert any("no run of the whole model" in note for note in found.notes)
    assert found.provenance.compiled
    assert all(layer.backward_input is None for layer in found.layers)
    assert snapshot(model) == before


class InvalidCxxCompiler(RuntimeError):
    """Named as inductor's."""


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch):
    def compile_nothing(function):
        def run(*given):
            raise InvalidCxxCompiler("No working C++ compiler found in CXX=g++")

        return run

    monkeypatch.setattr(torch, "compile", compile_nothing)
    options = ProfilingOptions(budget_s=0.001, num_threads=1, compile=True)
    with pytest.raises(MeasurementError, match=r"g\+\+ or clang\+\+.*profile without compiling"):
        profile(nn.Sequential(nn.Linear(4, 2)), SAMPLE, options=options)
