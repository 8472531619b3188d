"""What a profile says of memory is what the allocator hands out."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.activation_memory import LIMITS, Study, failures, measured_peak
from benchmarks.activation_memory_page import page
from benchmarks.allocations import Allocations
from benchmarks.memory_models import ByAttribute, ByName, Recomputed
from benchmarks.stage_runs import Place
from stagewright.core.models.training_memory import OPTIMIZERS, training_bytes
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.machine.memory import allocated_bytes
from stagewright.profiler.measure.profile import profile

QUICK = ProfilingOptions(budget_s=0.01, num_threads=1)
FLOAT, KIB = 4, 1024


def table(model, sample):
    """The storage table as pairs of bytes and layers, in a fixed order."""
    found = profile(model, sample, options=QUICK)
    return sorted((entry.size_bytes, entry.layers) for entry in found.storages)


@pytest.fixture(scope="module")
def mixed():
    return Study("mixed", "cpu")


def test_every_interval_keeps_what_the_table_says(mixed):
    """Recomputed blocks, custom functions, views, in place, batch statistics: to the byte."""
    cuts = mixed.run.cuts
    lasting = [(first, first + 2) for first in cuts if first + 2 in cuts]
    intervals = [*lasting, (0, 1), (3, 9), (0, mixed.run.num_layers)]
    assert len(intervals) == 14
    for first, last in intervals:
        assert mixed.predicted_bytes(first, last) == mixed.held_bytes(first, last), (first, last)


def test_a_table_that_lacks_a_storage_is_found_out(mixed):
    largest = max(mixed.profile.storages, key=lambda entry: entry.size_bytes)
    others = tuple(entry for entry in mixed.profile.storages if entry is not largest)
    whole = mixed.profile
    try:
        mixed.profile = whole.model_copy(update={"storages": others})
        rows = mixed.intervals(0)
    finally:
        mixed.profile = whole
    worst = abs(rows[0]["relative_error"])
    result = {"worst_interval": worst, "worst_whole": worst, "median_peak": 0.0}
    assert len(failures(result)) == 2
    assert failures({"worst_interval": 0.03, "worst_whole": 0.01, "median_peak": 0.05}) == []


@pytest.fixture(scope="module")
def peaks(mixed):
    return mixed.peaks([("gpipe", 2, 4), ("1f1b", 3, 6)])


def test_peaks_of_stages_are_predicted(peaks):
    assert [row["in_flight"] for row in peaks] == [4, 4, 3, 2, 1]
    # What the last stage receives is kept by none of its layers, and not counted: 6 % of it.
    assert all(-0.07 < row["relative_error"] < 0.15 for row in peaks)


def test_the_page_states_every_model_and_stage(mixed, peaks):
    intervals = mixed.intervals(1)
    result = {
        "device": "cpu",
        "torch": torch.__version__,
        "limits": LIMITS,
        "worst_interval": 0.0,
        "worst_whole": 0.0,
        "median_peak": 0.01,
        "wholes": intervals[:1],
        "intervals": intervals[1:],
        "peaks": peaks,
        "recomputed_peaks": mixed.peaks([("1f1b", 2, 2)], "always"),
    }
    text = page(result)
    assert f"| mixed | 12 | {intervals[0]['held_bytes']:,} |" in text
    assert text.count("| gpipe | ") == 2
    recomputed = result["recomputed_peaks"]
    assert all(abs(row["relative_error"]) < 0.1 for row in recomputed)
    assert recomputed[0]["parts"]["activations_bytes"] < peaks[0]["parts"]["activations_bytes"] / 4


def test_the_order_of_work_holds_as_many_as_are_in_flight():
    assert "".join(Place(0, 1, 4, 4).order()) == "FFFFBBBB"
    assert "".join(Place(0, 1, 4, 2).order()) == "FFBFBFBB"
    assert "".join(Place(0, 1, 3, 1).order()) == "FBFBFB"


def test_what_a_function_keeps_by_attribute_counts():
    """Autograd's hooks never see it: gate and product, 8 x 16 floats each."""
    by_name = table(nn.Sequential(nn.Linear(16, 16), ByName(16)), torch.randn(8, 16))
    by_attribute = table(nn.Sequential(nn.Linear(16, 16), ByAttribute(16)), torch.randn(8, 16))
    size = FLOAT * 8 * 16
    # The linear inside keeps the first layer's output; the function what it says.
    assert by_name == [(size, (1,))] * 2
    assert by_attribute == [(size, (1,))] * 3


def test_a_recomputed_block_keeps_its_input_alone():
    kept = table(nn.Sequential(nn.Linear(16, 16), Recomputed(16)), torch.randn(8, 16))
    assert kept == [(FLOAT * 8 * 16, (1,))]


def test_a_recomputed_block_keeps_what_the_one_in_front_keeps_too():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False, preserve_rng_state=False)

    kept = table(nn.Sequential(nn.Sigmoid(), nn.Linear(16, 16), Twice()), torch.randn(8, 16))
    size = FLOAT * 8 * 16
    # Nothing of the model's own input; the linear's input and the block's, the linear's output.
    assert kept == [(size, (1,)), (size, (2,))]


def test_storages_that_neighbours_share_are_one():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    assert table(model, torch.randn(8, 16)) == [(FLOAT * 8 * 16, (1, 2))]


def test_in_place_counts_once_where_it_happens():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
    assert table(model, torch.randn(8, 16)) == [(FLOAT * 8 * 16, (1, 2))]


def test_dropout_keeps_a_mask_and_batch_norm_its_statistics():
    dropped = table(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), torch.randn(8, 16))
    assert len(dropped) == 1
    assert dropped[0][1] == (1,)
    normalised = table(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), torch.randn(8, 16))
    statistic, x = (FLOAT * 16, (1,)), (FLOAT * 8 * 16, (1,))
    assert normalised == [statistic, statistic, x]


def test_views_count_as_the_storage_they_show():
    class Split(nn.Module):
        def forward(self, x):
            left, right = x.chunk(2, -1)
            return left * right

    kept = table(nn.Sequential(nn.Linear(16, 32), Split()), torch.randn(8, 16))
    assert kept == [(FLOAT * 8 * 32, (1,))]


def test_what_a_module_remembers_is_not_autograds():
    class Remembers(nn.Module):
        def forward(self, x):
            self.last = x.detach() * 3
            return x.exp()

    kept = table(nn.Sequential(nn.Linear(16, 16), Remembers()), torch.randn(8, 16))
    assert kept == [(FLOAT * 8 * 16, (1,))]


def test_the_loss_needs_its_workspace_on_the_last_stage():
    """Cross-entropy of 64 x 1000 scores: they are held, and so is their gradient."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1000))
    target = torch.randint(0, 1000, (64,))
    without = profile(model, torch.randn(64, 16), options=QUICK)
    found = profile(
        model,
        torch.randn(64, 16),
        options=QUICK,
        loss_fn=nn.functional.cross_entropy,
        target=target,
    )
    scores = FLOAT * 64 * 1000
    assert found.layers[-1].workspace_bytes >= 2 * scores
    assert found.layers[-1].workspace_bytes > without.layers[-1].workspace_bytes
    assert found.layers[0].workspace_bytes == without.layers[0].workspace_bytes


def test_a_gradient_that_waits_for_a_layer_in_front_is_workspace():
    class Skip(nn.Module):
        def __init__(self, *, skips):
            super().__init__()
            self.skips = skips
            self.front = nn.Linear(16, 512)
            self.inner = nn.ModuleList([nn.Linear(512, 8), nn.Linear(8, 512)])

        def forward(self, x):
            x = self.front(x)
            y = self.inner[1](self.inner[0](x))
            return y + x if self.skips else y

    workspace = {
        skips: [
            entry.workspace_bytes
            for entry in profile(Skip(skips=skips), torch.randn(64, 16), options=QUICK).layers
        ]
        for skips in (False, True)
    }
    assert workspace[True][1] == workspace[False][1] + FLOAT * 64 * 512


def test_allocations_are_counted_by_the_allocator():
    with Allocations() as allocations:
        kept = torch.zeros(1000)
        torch.zeros(5000).sum()
    assert allocations.kept_bytes == FLOAT * kept.numel()
    assert FLOAT * 6000 <= allocations.peak_bytes <= FLOAT * 6000 + 64


MADE = {
    "none": lambda parameters: None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "muon": lambda parameters: torch.optim.Muon(parameters),
}


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MADE)
def test_optimizer_state_is_what_torch_keeps(name, recipe):
    """But for `adamw_8bit`, which torch does not have, and what `adafactor` factors."""
    weights = torch.float32 if recipe == "fp32" else torch.bfloat16
    model = nn.Linear(256, 320, bias=name not in ("adafactor", "muon")).to(weights)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = MADE[name](parameters)
    if optimizer is not None:
        optimizer.step()
    state = optimizer.state.values() if optimizer is not None else ()
    tensors = [value for entry in state for value in entry.values() if torch.is_tensor(value)]
    found = sum(value.numel() * value.element_size() for value in tensors if value.dim())
    elements = sum(parameter.numel() for parameter in parameters)
    expected = training_bytes(recipe, name).of_state(elements)
    assert expected <= found <= expected + 0.01 * FLOAT * elements
    assert name == "adafactor" or found == expected


def test_every_optimizer_is_compared_with_torchs():
    assert {*MADE, "adamw_8bit"} == set(OPTIMIZERS)


def test_a_stage_alone_holds_the_optimizers_state(mixed):
    from contextlib import nullcontext

    from benchmarks.stage_runs import StageRunner

    stage = StageRunner(mixed.run, Place(0, 3, 1, 1), nullcontext)
    elements = sum(parameter.numel() for parameter in stage.module.parameters())
    device = torch.device("cpu")
    without = measured_peak(stage, device, optimizer=False)
    with_adam = measured_peak(stage, device)
    counts = FLOAT * len(list(stage.module.parameters()))
    assert with_adam - without == training_bytes("fp32", "adam").of_state(elements) + counts


@pytest.mark.parametrize(
    ("asked", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (3 * KIB, 3 * KIB)]
)
def test_cuda_hands_out_blocks(asked, block):
    assert allocated_bytes(asked, torch.device("cuda")) == block
    assert allocated_bytes(asked, torch.device("cpu")) == asked


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 513, 3 * KIB, 64 * KIB])
def test_blocks_are_what_cuda_allocates(size):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == allocated_bytes(kept.numel(), kept.device)


@pytest.mark.gpu
def test_cuda_keeps_what_the_table_says():
    study = Study("mixed", "cuda")
    for first, last in [(0, study.run.num_layers), *study.random_intervals(10)]:
        predicted, held = study.predicted_bytes(first, last), study.held_bytes(first, last)
        assert predicted == pytest.approx(held, rel=0.03), (first, last)
