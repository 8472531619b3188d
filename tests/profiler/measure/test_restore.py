"""Whatever happens while profiling, the model comes out of it bit for bit as it went in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import CaptureError, MeasurementError, StagewrightError
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.core.units import format_bytes
from stagewright.profiler.measure.profile import profile
from tests.state_checks import snapshot
from tests.torch_models import make_case

QUICK = ProfilingOptions(budget_s=0.001, num_threads=1)
NEVER = 10**9


TALLY = SimpleNamespace(count=0, at=NEVER, error=None)
"""Of the one trip in use: out of the model's reach, or it would be put back with the model."""


class Trip:
    """Counts what passes it, and raises from a chosen count on; no state of the model's."""

    def __init__(self):
        self.arm(NEVER, None)

    def __call__(self, *_):
        TALLY.count += 1
        if TALLY.count >= TALLY.at and TALLY.error is not None:
            raise TALLY.error

    def arm(self, at, error):
        TALLY.count, TALLY.at, TALLY.error = 0, at, error

    @property
    def count(self):
        return TALLY.count

    @property
    def at(self):
        return TALLY.at


class Tripping(nn.Module):
    """Draws from every generator and changes a buffer, then goes past the trip."""

    def __init__(self, trip):
        super().__init__()
        self.trip = trip
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.trip()
        return x * 2 + float(np.random.rand() > 2) + float(torch.rand(()) > 2)


def build(trip):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), Tripping(trip), nn.Dropout(0.5), Tripping(trip),
        nn.Linear(8, 2),
    )  # fmt: skip
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.full((8,), 0.25)
    model[1].eval()
    model[5].weight.register_hook(lambda gradient: trip())
    model[3].register_forward_hook(lambda module, given, made: trip())
    return model


def everything(model):
    hooks = [
        [(key, id(hook)) for key, hook in table.items()]
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    numpy_state = np.random.get_state()
    return (
        snapshot(model),
        hooks,
        (numpy_state[1].tobytes(), numpy_state[2:]),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


@pytest.fixture(scope="module")
def trips_in_all():
    """How often the trip is passed while `build`'s model is profiled undisturbed."""
    trip = Trip()
    profile(build(trip), torch.ones(3, 4), options=QUICK)
    return trip.count


def test_success_leaves_everything():
    model = build(Trip())
    before = everything(model)
    profile(model, torch.ones(3, 4), options=QUICK)
    assert everything(model) == before


@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
    ids=["interrupt", "cuda", "cpu"],
)
def test_being_cut_short_anywhere_leaves_everything(trips_in_all, share, error):
    """From the first look at the model to the last repeat, in layers, hooks and gradients."""
    trip = Trip()
    model = build(trip)
    before = everything(model)
    trip.arm(max(round(share * trips_in_all), 1), error)
    wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StagewrightError
    with pytest.raises(wanted):
        profile(model, torch.ones(3, 4), options=QUICK)
    assert everything(model) == before


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_being_cut_short_in_a_leaf_of_a_captured_model_leaves_everything(name):
    """The hook of a leaf runs in the model and in the layers made of it."""
    case = make_case(name)
    leaf = case.model.bn1 if name == "resnet" else case.model.transformer.h[1].ln_1
    trip = Trip()
    leaf.register_forward_hook(trip)
    profile(case.model, case.sample, options=QUICK)
    before, all_of_them = everything(case.model), trip.count
    for at in (1, all_of_them // 2, all_of_them):
        trip.arm(at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            profile(case.model, case.sample, options=QUICK)
        assert everything(case.model) == before


class Greedy(nn.Module):
    """Asks for more memory than any machine has, from when the trip says so on."""

    def __init__(self, trip):
        super().__init__()
        self.trip = trip
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        self.trip()
        if self.trip.count >= self.trip.at:
            torch.empty(2**58)
        return x @ self.weight


def greedy(trip):
    return nn.Sequential(nn.Linear(4, 8), Greedy(trip), nn.Tanh())


@pytest.mark.parametrize("stage", ["capture", "first run", "passes"])
def test_memory_that_really_runs_out_is_put_down_to_its_layer(stage):
    """3 samples of 8 numbers in and out, 8 x 8 weights, the input kept: to be counted by hand."""
    trip = Trip()
    model, sample = greedy(trip), torch.ones(3, 4)
    trace(model, sample)
    in_capture = trip.count
    before = everything(model)
    trip.arm({"capture": 1, "first run": in_capture + 1, "passes": in_capture + 2}[stage], None)
    with pytest.raises(MeasurementError, match="out of memory in 1: ") as caught:
        profile(model, sample, options=QUICK)
    values, weights = 4 * 3 * 8, 4 * 8 * 8
    parts = [
        f"inputs {values} B",
        f"outputs {values} B",
        f"parameters {weights} B",
        f"gradients {values + weights} B",
    ]
    known = stage == "passes"
    total = 3 * values + 2 * weights + known * values
    if known:
        parts.append(f"kept for the backward {values} B")
    message = str(caught.value)
    assert "you tried to allocate" in message
    assert f"it needs {'' if known else 'at least '}{format_bytes(total)}" in message
    assert f"({', '.join(parts)})" in message
    assert "smaller micro-batch" in message
    assert everything(model) == before


def test_a_forward_that_changes_its_own_weights_is_refused_before_it_does():
    model = nn.Sequential(nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 2))
    before = everything(model)
    with pytest.raises(CaptureError, match="changes its own parameter"):
        profile(model, torch.tensor([[0, 1, 2]]), options=QUICK)
    assert everything(model) == before
