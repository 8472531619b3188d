"""Layers run under autocast or compiled when asked, and the profile says so."""

import pytest
import torch
from torch import nn

from stagewright.core.errors import MeasurementError
from stagewright.core.options import ProfilingOptions
from stagewright.profiler.profile import profile
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
    whole = found.reconciliation.whole_forward.repeats
    assert compiler.ran == 3 + 3 + repeats + 3 * whole  # compiling, a cold pass, passes, whole
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
