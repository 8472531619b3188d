"""benchmarks/capture.py: quick rows are equal, and whatever is wrong is called wrong."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import CaptureError

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def judged(name, tracer=trace):
    zoo = importlib.import_module("zoo.zoo").ZOO
    return importlib.import_module("zoo.judge").judge(zoo[name], tracer)


@pytest.mark.parametrize(
    "name", ["plain-sequential", "gru", "tied-language-model", "same-tensor-twice"]
)
def test_quick_rows_are_equal(name):
    row = judged(name)
    assert (row.verdict, row.reason) == ("equal", "")
    assert row.eval == "equal"
    assert max(row.outputs, row.gradients, row.parameters) < 1e-5


class Planted:
    """A capture whose pieces go through ``spoil`` first."""

    def __init__(self, captured, spoil):
        self._captured, self._spoil = captured, spoil
        self.graph, self.unflatten_output = captured.graph, captured.unflatten_output

    def segment(self, first, last):
        return self._spoil(self._captured.segment(first, last))


class Around(nn.Module):
    def __init__(self, piece):
        super().__init__()
        self.piece = piece

    def forward(self, *inputs):
        return self.piece(*inputs)


class Larger(Around):
    def forward(self, *inputs):
        return tuple(value * 1.1 for value in self.piece(*inputs))


class WithoutGradient(Around):
    def forward(self, *inputs):
        return self.piece(*(value.detach() for value in inputs))


class DoubleGradient(Around):
    def forward(self, *inputs):
        return tuple(2 * value - value.detach() for value in self.piece(*inputs))


class KeepsBuffers(Around):
    def forward(self, *inputs):
        before = [(buffer, buffer.clone()) for buffer in self.piece.buffers()]
        result = self.piece(*inputs)
        for buffer, value in before:
            buffer.data.copy_(value)
        return result


class AlwaysTrains(Around):
    def train(self, mode=True):
        return self


class ForgetsMode(Around):
    def train(self, mode=True):
        self.piece.train(mode and self.piece.training)
        return self


class OtherChance(Around):
    def forward(self, *inputs):
        torch.rand(())
        return self.piece(*inputs)


@pytest.mark.parametrize(
    ("name", "spoil", "when", "off"),
    [
        ("same-tensor-twice", Larger, "whole", {"output", "gradient"}),
        ("same-tensor-twice", WithoutGradient, "whole", {"gradient"}),
        ("gru", DoubleGradient, "whole", {"gradient"}),
        ("siamese", KeepsBuffers, "whole", {"buffer"}),
        ("plain-sequential", AlwaysTrains, "in evaluation", {"output"}),
        ("plain-sequential", ForgetsMode, "in training again", {"output"}),
        ("plain-sequential", OtherChance, "whole", {"output", "gradient"}),
    ],
)
def test_a_planted_mistake_is_called_wrong(name, spoil, when, off):
    row = judged(name, lambda model, sample: Planted(trace(model, sample), spoil))
    assert row.verdict == "WRONG", row.reason
    assert row.reason.startswith(when)
    assert {kind for kind in ("output", "gradient", "buffer") if kind in row.reason} == off


def test_a_choice_frozen_in_the_sample_is_called_wrong():
    class Frozen:
        def __init__(self, model, sample):
            self._captured = trace(model.left, sample)
            self.graph = self._captured.graph
            self.segment, self.unflatten_output = self._captured.segment, lambda flat: flat[0]

    class First(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.left = model.gate.left

    row = judged("data-branch-layer", lambda model, sample: Frozen(First(model), sample))
    assert row.verdict == "WRONG"


def test_a_model_that_tracing_changed_is_called_wrong():
    def careless(model, sample):
        captured = trace(model, sample)
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        return captured

    row = judged("plain-sequential", careless)
    assert row.verdict == "WRONG"
    assert "after tracing" in row.reason


def test_a_refusal_is_one_and_any_other_error_is_a_failure():
    def raising(error):
        def tracer(model, sample):
            raise error

        return judged("plain-sequential", tracer)

    assert raising(CaptureError("cannot\nbecause")).verdict == "refused"
    assert raising(CaptureError("cannot\nbecause")).reason == "cannot"
    assert raising(KeyError("x")).verdict == "failed"


SCRIPT = """
import dataclasses, os, sys, time
sys.path.insert(0, "benchmarks")
import capture
good = capture.ZOO["plain-sequential"]
for name, build in (("dies", lambda: os._exit(3)), ("hangs", lambda: time.sleep(600))):
    capture.ZOO[name] = dataclasses.replace(good, name=name, build=build)
sys.exit(capture.main())
"""


def test_a_crash_costs_its_own_row_only(forking_executable, tmp_path):
    document = tmp_path / "capture.md"
    document.write_text("<!-- written by benchmarks/capture.py -->\n<!-- end -->\n")
    words = ["--json", "--only", "dies,hangs,plain-sequential", "--write", str(document)]
    done = subprocess.run(
        [str(forking_executable), "-c", SCRIPT, *words, "--time-limit", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1
    assert rows["plain-sequential"]["verdict"] == "equal"
    assert rows["dies"]["reason"] == "its process ended with 3"
    assert rows["hangs"]["reason"] == "still running when its time was up"
    assert "1 of 3 architectures equal" in document.read_text()
    assert "| **failed** |" in document.read_text()


def drawn_rows(executable, *words):
    """The rows of an excerpt of a drawn table."""
    done = subprocess.run(
        [str(executable), "benchmarks/capture.py", "--json", "--time-limit", "200", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-2000:]
    return [row for row in rows if row["verdict"] != "not built"]


EXPLAINED = ("equal", "equal, with opaque layers", "equal in training", "refused")


@pytest.mark.timeout(600)
def test_drawn_architectures_are_equal_or_refused(forking_executable):
    rows = drawn_rows(forking_executable, "--drawn", "3")
    assert len(rows) == 3
    assert all(row["verdict"] in EXPLAINED for row in rows), rows


@pytest.mark.timeout(600)
def test_drawn_nets_of_timm_are_equal_and_traced(forking_executable):
    if not (ROOT / ".timm").is_dir():
        pytest.skip("make timm installs it")
    (row,) = drawn_rows(forking_executable, "--timm", "1")
    assert row["verdict"] == "equal", row


def reads_the_original(piece):
    """Make copies of a piece run the original: right as long as they share its memory."""
    written = piece.forward
    piece.forward = lambda *inputs: written(*inputs)
    return piece


@pytest.mark.parametrize(("spoil", "verdict"), [(None, "equal"), (reads_the_original, "WRONG")])
def test_what_a_piece_reaches_beyond_its_own_modules_is_called_wrong(spoil, verdict):
    spoil = spoil or (lambda piece: piece)
    row = judged("plain-sequential", lambda model, sample: Planted(trace(model, sample), spoil))
    assert row.verdict == verdict
    assert row.reason.startswith("cut" if spoil is reads_the_original else "")
