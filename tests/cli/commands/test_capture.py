"""`capture` of families, of requests in files, and of people's own models."""

import json
import sys

import pytest
import torch

from stagewright.cli.main import main
from stagewright.core.graph.graph import Graph
from stagewright.core.profile.profile import Profile

THEIRS = """
import random
import torch

class Lucky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if random.random() < 0.5 else x

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.chance = torch.nn.Linear(4, 4), Lucky()

    def forward(self, x):
        return self.chance(self.first(x))

def sample():
    return torch.randn(3, 4)

class Changing(torch.nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(2)
        return super().forward(x)

def changing():
    return Changing(4, 4)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "theirs_captured.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("theirs_captured", None)


def test_the_report_says_what_is_opaque_and_why(theirs, capsys):
    words = ("capture", "theirs_captured:Model", "--sample", "theirs_captured:sample")
    assert main([*words, "-o", "graph.json"]) == 0
    text = capsys.readouterr().out
    assert "captured by torch.export" in text
    assert "random numbers" in text
    graph = Graph.from_json((theirs / "graph.json").read_text())
    assert [bool(layer.opaque) for layer in graph.layers] == [False, True]


def test_what_is_not_data_and_what_is_next_are_told(theirs, capsys):
    words = ("capture", "theirs_captured:Model", "--sample", "theirs_captured:sample")
    assert main([*words, "--no-check", "-o", "graph.json"]) == 0
    found = capsys.readouterr()
    assert "  cannot be measured without the model's code: " in found.out
    assert found.err.splitlines() == [
        "wrote graph.json",
        "next: stagewright profile theirs_captured:Model --sample theirs_captured:sample",
    ]


def test_a_graph_that_is_data_is_next(theirs, capsys):
    words = ["capture", "--family", "mlp", "--input", "input=2x64"]
    assert main([*words, "--output", "graph.json"]) == 0
    found = capsys.readouterr()
    assert "without the model's code" not in found.out
    assert found.err.splitlines()[-1] == "next: stagewright profile graph.json"
    assert main(words) == 0
    following = capsys.readouterr().err
    assert following == "next: stagewright profile --family mlp --input input=2x64\n"
    assert main(["capture", "graph.json"]) == 2
    assert "already holds a captured graph" in capsys.readouterr().err


def test_json_is_one_document(theirs, capsys):
    words = ("capture", "theirs_captured:Model", "--sample", "theirs_captured:sample")
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [layer["how"] for layer in report["layers"]] == ["traced", "opaque"]
    assert report["mode"] == "export"


def test_a_model_that_cannot_be_captured_has_to_change(theirs, capsys):
    words = ("capture", "theirs_captured:changing", "--sample", "theirs_captured:sample")
    assert main(words) == 2
    assert "into a submodule" in capsys.readouterr().err


def test_a_family_is_captured(capsys):
    words = ("capture", "--family", "mlp", "--config", '{"num_layers": 2}', "--input")
    assert main([*words, "input=2x64"]) == 0
    assert "nn.Sequential" in capsys.readouterr().out


def test_options_that_would_be_ignored_are_refused(capsys):
    assert main(["capture", "--family", "mlp", "--sample", "a:b"]) == 2
    assert main(["capture"]) == 2


def test_an_exported_program_is_captured_and_named_among_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    torch.export.save(torch.export.export(layers, (torch.ones(3, 4),)), "model.pt2")
    assert main(["capture", "model.pt2", "-o", "graph.json"]) == 0
    out, err = capsys.readouterr()
    assert "Sequential: captured" in out
    assert err.endswith("next: stagewright profile graph.json\n")
    assert [layer.name for layer in Graph.read("graph.json").layers] == ["0", "1"]
    assert main(["capture", "model.pt2", "--sample", "theirs:sample"]) == 2
    assert "leave out --sample" in capsys.readouterr().err
    assert main(["plan", "model.pt2", "--devices", "2xH100"]) == 2
    assert "name what 'stagewright profile' or 'capture' writes" in capsys.readouterr().err
    assert main(["profile", "model.pt2", "--budget", "0.2", "-o", "profile.json"]) == 0
    assert Profile.read("profile.json").model == "Sequential"
