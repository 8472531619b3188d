"""Why a module stays as written, in words its author understands."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.report import choose_reason, plain_reason
from stagewright.core.errors import InvalidInput
from tests.capture.awkward import Branch, Quantised

TORCH_SAYS = (
    "torch.export: GuardOnDataDependentSymNode: Could not guard on data-dependent expression "
    "Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)"
)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (TORCH_SAYS, "it branches on its data"),
        ("torch.fx: TraceError in gate: symbolically traced variables cannot be used as inputs to "
         "control flow", "it branches on its data"),
        ("torch.export: GuardOnDataDependentSymNode: Could not extract specialized integer from "
         "data-dependent expression u0", "it computes a number from its data and goes on with it "
         "in Python"),
        ("torch.fx: a random number was drawn while tracing and would be frozen",
         "it draws random numbers in Python"),
        ("forward of the model itself hooks a tensor's gradient",
         "its own forward hooks a tensor's gradient"),
        ("torch.export: ValueError: cat expects tensors\nmore", "ValueError: cat expects tensors"),
    ],
)  # fmt: skip
def test_what_tracers_say_is_said_plainly(refusal, reason):
    assert plain_reason(refusal) == reason


def test_other_words_are_cut_short_and_known_reasons_come_first():
    assert len(plain_reason("torch.export: " + "long " * 99)) <= 100
    assert choose_reason(["torch.export: odd", TORCH_SAYS]) == "it branches on its data"
    assert choose_reason(["torch.export: odd", "torch.fx: odder"]) == "odd"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), Branch(), Quantised()

    def forward(self, x):
        return self.last(self.gate(self.first(x)))


def test_reports_say_why_in_a_sentence_and_what_is_kept():
    """Cause: a branch on data was a GuardOnDataDependentSymNode, a kept function just "traced"."""
    report = trace(Model(), torch.randn(3, 8), check=False).report()
    whys = {layer.name: (layer.how, layer.why) for layer in report.layers}
    assert whys["gate"] == ("opaque", "could not be traced: it branches on its data")
    assert whys["last.fc"] == ("traced", "calls Round with its own derivative, kept as it is")
    assert whys["first"] == ("traced", "")


def test_a_model_that_is_one_layer_says_why_once():
    (layer,) = trace(Branch(), torch.randn(3, 8), check=False).report().layers
    assert layer.why == "could not be taken apart: it branches on its data"


class TopLevelBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x):
        if self.layers(x).abs().mean() > 0.5:
            x = 2 * x
        return self.layers(x)


def test_a_model_that_is_one_layer_names_file_line_and_expression():
    """Cause: a plan with idle devices said only that the model cannot be cut."""
    line = TopLevelBranch.forward.__code__.co_firstlineno + 1
    (note, _) = trace(TopLevelBranch(), torch.randn(3, 8)).graph.notes
    assert note.endswith(
        "cannot be cut: it branches on its data, at "
        f"test_report.py:{line}: self.layers(x).abs().mean() > 0.5"
    )


class Selected(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        mask = x > 0
        return self.last(torch.masked_scatter(x, mask, x[mask] * 2))


def test_a_shape_inside_a_layer_that_depends_on_data_is_left_to_the_model():
    """Cause: only the outputs were checked, and the document of the graph raised torch's error."""
    (layer,) = trace(Selected(), torch.randn(3, 8)).graph.layers
    assert layer.opaque


def test_a_sample_without_values_is_refused():
    """Cause: copying it was reported as a bug of ours."""
    with pytest.raises(InvalidInput, match="'input' of the sample is on the device meta"):
        trace(nn.Linear(8, 8), torch.randn(3, 8, device="meta"))
