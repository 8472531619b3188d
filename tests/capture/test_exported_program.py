"""A ``.pt2`` file becomes a module that is captured as the model it was exported from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.exported_program import load_exported
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import CaptureError, InvalidInput
from stagewright.core.graph.graph import Graph
from stagewright.core.requests.requests import EstimateRequest
from stagewright.profiler.estimates.worker import estimate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Net(nn.Module):
    """Blocks, a buffer, a constant made inside, a part without gradients, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = x * self.scale + torch.arange(16)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            factor = x.mean(-1, keepdim=True).cos()
        left, right = torch.split(self.head(x * factor), 2, dim=-1)
        return {"sum": left + right, "left": left}


class Tied(nn.Module):
    """Blocks with modules inside, a weight of two names, and an input that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if mask is None else self.head(x) * mask


class Repeated(nn.Module):
    """A module that runs twice, and inputs in a dict beside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair, scale=2.0):
        return self.first(self.second(self.first(pair["u"]) + pair["v"])) * scale


def convolutions() -> nn.Module:
    """Batch statistics, which are changed in place, and an in-place activation."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    )


def half_frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)).bfloat16()


IDS = torch.arange(16).reshape(2, 8)
PAIR = {"u": torch.ones(4, 8), "v": torch.zeros(4, 8)}
MODELS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "a tensor": (Net, (torch.zeros(4, 16),), {}),
    "by position": (Tied, (IDS,), {}),
    "by keyword": (Tied, (), {"ids": IDS}),
    "both": (Tied, (IDS,), {"mask": torch.ones(2, 8, 32)}),
    "a dict": (Repeated, (PAIR,), {}),
    "a number": (Repeated, (PAIR, 3.0), {}),
    "statistics": (convolutions, (torch.zeros(2, 3, 8, 8),), {}),
    "frozen, bfloat16": (half_frozen, (torch.zeros(4, 8, dtype=torch.bfloat16),), {}),
}


def saved(folder: Path, model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Path:
    path = folder / "model.pt2"
    torch.export.save(torch.export.export(model, args, kwargs, **options), path)
    return path


def names_of(graph: Graph) -> dict[str, Any]:
    """What a plan takes from a graph, by name."""
    return {
        "model": graph.model,
        "inputs": [(tensor.name, tensor.shape, tensor.dtype) for tensor in graph.inputs],
        "layers": [(layer.name, layer.module_type) for layer in graph.layers],
        "parameters": {(one.names, one.layers, one.trainable) for one in graph.parameters},
        "cuts": [(one.legal, one.forward_bytes, one.backward_bytes) for one in graph.boundaries],
        "outputs": graph.output_paths,
    }


@pytest.mark.parametrize("name", MODELS)
def test_it_is_cut_and_costs_what_the_model_does(tmp_path, name):
    make, args, kwargs = MODELS[name]
    model = make()
    of_file = trace(*load_exported(saved(tmp_path, model, args, kwargs))).graph
    named = dict(zip(("ids", "mask"), args, strict=False)) if kwargs else args
    own = trace(model, {**named, **kwargs} if kwargs else args).graph
    assert of_file.rebuildable
    assert names_of(of_file) == names_of(own)
    costs = [
        [(entry.forward, entry.saved_activation_bytes) for entry in profile.layers]
        for profile in (
            estimate(EstimateRequest(graph=each, cluster=Cluster.parse("1xH100"))).profile
            for each in (of_file, own)
        )
    ]
    assert costs[0] == costs[1]


def test_sizes_left_open_are_those_of_the_sample(tmp_path):
    batch = torch.export.Dim("batch", min=2, max=64)
    path = saved(tmp_path, Net(), (torch.zeros(4, 16),), {}, dynamic_shapes=({0: batch},))
    assert trace(*load_exported(path)).graph.inputs[0].shape == (4, 16)


def test_the_weights_are_those_of_the_file(tmp_path):
    model, x = Net().eval(), torch.randn(4, 16)
    module, sample = load_exported(saved(tmp_path, model, (x,), {}))
    assert torch.equal(module(**sample)["sum"], model(x)["sum"])
    assert torch.equal(module(x=x)["left"], model(x)["left"])


def write_text(path: Path) -> None:
    path.write_text("no archive")


def write_weights(path: Path) -> None:
    torch.save(Net().state_dict(), path)


def write_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("write", [write_text, write_weights, write_empty])
def test_another_file_is_refused_with_what_to_write(tmp_path, caplog, write):
    path = tmp_path / "other.pt2"
    write(path)
    with pytest.raises(InvalidInput, match=r"other\.pt2 as an exported program; .*export\.save"):
        load_exported(path)
    assert caplog.text == ""
    assert not logging.getLogger("torch.export").disabled


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot read .*none\.pt2: No such file"):
        load_exported(tmp_path / "none.pt2")


def test_a_program_without_a_sample_is_refused(tmp_path):
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(4, 2),))
    program.example_inputs = None
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(InvalidInput, match="has no sample inputs"):
        load_exported(tmp_path / "model.pt2")


def test_a_program_that_torch_cannot_divide_is_refused_by_name(tmp_path, monkeypatch):
    def fail(program: Any) -> None:
        raise RuntimeError("no such module")

    path = saved(tmp_path, nn.Linear(2, 2), (torch.ones(4, 2),), {})
    monkeypatch.setattr(torch.export, "unflatten", fail)
    with pytest.raises(CaptureError, match=r"model\.pt2 \(no such module\); capture"):
        load_exported(path)
