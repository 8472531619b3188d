"""An uploaded ``.pt2``: its JSON becomes the graph that capture makes; nothing else is opened."""

from __future__ import annotations

import copy
import io
import json
import pickle
import time
import warnings
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.fuzz_pt2 import Outcome, read_here
from stagewright.capture.capture import trace
from stagewright.capture.pt2 import archive as archives
from stagewright.capture.pt2.archive import read_program_json
from stagewright.capture.pt2.graph import read_pt2
from stagewright.client.model_sources import read_pt2_without_weights
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
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
        mask = (torch.arange(16) > 2) & (torch.arange(16) > 1)
        for block in self.blocks:
            x = block(x) * mask
        with torch.no_grad():
            factor = x.mean(-1, keepdim=True).cos()
        left, right = torch.split(self.head(x * factor), 2, dim=-1)
        return {"sum": left + right, "left": left}


class WithState(nn.Module):
    """Batch statistics, which are changed in place, and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
        )

    def forward(self, image):
        return self.layers(image)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


MODELS = {
    "net": (Net, (torch.zeros(4, 16),)),
    "state": (WithState, (torch.zeros(2, 3, 8, 8),)),
    "sequential": (plain, (torch.zeros(2, 4),)),
}


def pt2(model: nn.Module, sample: tuple[Any, ...], **options: Any) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, sample, **options), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def archive() -> bytes:
    return pt2(Net(), MODELS["net"][1])


@pytest.fixture
def program(archive) -> dict[str, Any]:
    """The program's JSON, to be changed at will."""
    read: dict[str, Any] = json.loads(read_program_json(archive))
    return copy.deepcopy(read)


def packed(program: Any, name: str = "net/models/model.json", **others: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr(name, program if isinstance(program, bytes) else json.dumps(program))
        for other, content in others.items():
            members.writestr(other, content)
    return file.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_cut_and_costs_what_the_captured_model_does(name):
    make, sample = MODELS[name]
    graph, own = read_pt2(pt2(make(), sample)), trace(make(), sample).graph
    assert [layer.name for layer in graph.layers] == [layer.name for layer in own.layers]
    assert [layer.parameter_bytes for layer in graph.layers] == [
        layer.parameter_bytes for layer in own.layers
    ]
    for found, expected in zip(graph.boundaries, own.boundaries, strict=True):
        assert (found.legal, found.forward_bytes, found.backward_bytes) == (
            expected.legal, expected.forward_bytes, expected.backward_bytes,
        )  # fmt: skip
    assert {name for p in graph.parameters for name in p.names} == {
        name for p in own.parameters for name in p.names
    }
    read, captured = (
        estimate(EstimateRequest(graph=one, cluster=Cluster.parse("1xH100"))).profile
        for one in (graph, own)
    )
    assert [entry.forward for entry in read.layers] == [entry.forward for entry in captured.layers]
    assert [entry.saved_activation_bytes for entry in read.layers] == [
        entry.saved_activation_bytes for entry in captured.layers
    ]
    assert read.model == type(make()).__name__


def test_what_it_returns_keeps_its_places(archive):
    graph = read_pt2(archive)
    assert graph.output_paths == (("sum",), ("left",))
    assert json.loads(graph.input_structure) == {"positional": ["x"], "keyword": []}
    assert Graph.from_json(graph.to_json()) == graph


class Runs:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_no_other_member_is_opened(archive, tmp_path):
    marker = tmp_path / "ran"
    poison = pickle.dumps(Runs(marker))
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        names = [name for name in members.namelist() if not name.endswith("models/model.json")]
    text = read_program_json(archive)
    body = packed(text, **dict.fromkeys(names, poison))
    assert read_pt2(body) == read_pt2(archive)
    assert not marker.exists()
    pickle.loads(poison)
    assert marker.exists(), "the poison has to work for this test to say something"


def test_an_archive_without_its_weights_will_do(archive):
    assert read_pt2(packed(read_program_json(archive))) == read_pt2(archive)


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch):
    body = packed(b" " * 2**24)
    assert len(body) < 2**16

    def opened(*_, **__):
        raise AssertionError("unpacked")

    monkeypatch.setattr(zipfile.ZipFile, "open", opened)
    with pytest.raises(InvalidInput, match="200 times the compressed size"):
        read_program_json(body)


def test_what_is_unpacked_is_limited_whatever_the_header_says(monkeypatch):
    """The size in the central directory is the sender's word; zlib may give more."""
    body = bytearray(packed(b" " * 10_000_000 + b"{}"))
    size = (10_000_002).to_bytes(4, "little")
    assert body.count(size) == 2
    monkeypatch.setattr(archives, "MAX_PROGRAM_BYTES", 1000)
    with pytest.raises(InvalidInput, match=r"crc|CRC|over 1000|limits are 1000|program is"):
        read_program_json(bytes(body.replace(size, (900).to_bytes(4, "little"))))


def changed(program: dict[str, Any], change: Any) -> bytes:
    change(program["graph_module"])
    return packed(program)


def set_target(target: str) -> Any:
    return lambda module: module["graph"]["nodes"][2].update(target=target)


def set_size(size: dict[str, Any]) -> Any:
    return lambda module: module["graph"]["tensor_values"]["x"]["sizes"].__setitem__(0, size)


def set_argument(argument: dict[str, Any]) -> Any:
    return lambda module: module["graph"]["nodes"][2]["inputs"][0].update(arg=argument)


def rename(name: str) -> Any:
    return lambda module: module["signature"]["input_specs"][0]["parameter"].update(
        parameter_name=name
    )


def describe_nothing(module: dict[str, Any]) -> None:
    module["graph"]["tensor_values"].popitem()


def run_in(stack: str) -> Any:
    return lambda module: module["graph"]["nodes"][2]["metadata"].update(nn_module_stack=stack)


EXPRESSION = {"as_expr": {"expr_str": "__import__('os').system('touch ran')"}}
REFUSED = {
    "an operator outside": (set_target("torch.ops.aten.set_.source_Tensor"), "not on the list"),
    "python": (set_target("os.system"), "not on the list"),
    "an expression": (set_size(EXPRESSION), "dynamic_shapes"),
    "a number as text": (set_size({"as_int": "4"}), "not as torch.export writes it"),
    "a huge tensor": (set_size({"as_int": 2**41}), "too large: at most"),
    "another layout": (lambda m: m["graph"]["tensor_values"]["x"].update(layout=1), "strided"),
    "no signature": (lambda m: m.pop("signature"), "KeyError"),
    "a use of nothing": (set_argument({"as_tensor": {"name": "none"}}), "none"),
    "a graph as argument": (set_argument({"as_graph": {}}), "as_graph"),
    "a name that is code": (rename("a;import os"), "match"),
    "a module path of 20,001 parts": (
        lambda m: m["module_call_graph"].append({"fqn": "a." * 20_000 + "a"}),
        "a name of 40001 characters",
    ),
    "a module path of 65 parts": (
        lambda m: m["module_call_graph"].append({"fqn": "a." * 64 + "a"}),
        "a path of 65 parts",
    ),
    "an operation in 65 modules": (run_in(";".join(["k,a,torch.nn.Linear"] * 65)), "65 modules"),
    "an operation in a long module": (run_in("k," + "a" * 501 + ",Linear"), "501 characters"),
    "a tensor that is not described": (describe_nothing, "KeyError"),
    "a result of nothing": (
        lambda m: m["signature"]["output_specs"][0]["user_output"].update(
            arg={"as_tensor": {"name": "ghost"}}
        ),
        "ghost",
    ),
    "a number beyond all": (set_argument({"as_float": 10**400}), "OverflowError"),
    "a custom object": (
        lambda m: m["signature"]["input_specs"].append({"custom_obj": {}}),
        "custom_obj",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(program, name):
    change, words = REFUSED[name]
    with pytest.raises(InvalidInput, match=words):
        read_pt2(changed(program, change))


def test_varying_sizes_are_refused_with_the_way_out():
    batch = torch.export.Dim("batch", min=2, max=8)
    body = pt2(nn.Sequential(nn.Linear(4, 2)), (torch.zeros(4, 4),), dynamic_shapes=({0: batch},))
    with pytest.raises(InvalidInput, match="without dynamic_shapes"):
        read_pt2(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not an archive"),
        (b"PK\x03\x04 cut off", "not an archive"),
        (packed({}, "net/other.json"), "holds 0 programs"),
        (packed({}, "models/model.json"), "holds 0 programs"),
        (packed({}, **{"net/models/second.json": b"{}"}), "holds 2 programs"),
        (packed(b"{"), "not as torch.export writes it"),
        (packed(b"[" * 900 + b"]" * 900), "not as torch.export writes it"),
        (packed({"schema_version": {"major": 7}}), "reads 8"),
        (packed(b"[1]"), "not as torch.export writes it"),
        (packed(b'{"schema_version": {"major": NaN}}'), "not as torch.export writes it"),
    ],
)
def test_what_is_no_such_archive_is_refused(body, words):
    with pytest.raises(InvalidInput, match=words):
        read_pt2(body)


def chain(length: int) -> dict[str, Any]:
    """A program in which each of many modules adds its input to the model's."""
    meta = {"dtype": 7, "layout": 7, "requires_grad": False,
            "sizes": [{"as_int": 2}], "strides": [{"as_int": 1}]}  # fmt: skip
    names = [f"t{number}" for number in range(length + 1)]
    return {
        "schema_version": {"major": 8},
        "graph_module": {
            "graph": {
                "tensor_values": dict.fromkeys(names, meta),
                "nodes": [
                    {
                        "target": "torch.ops.aten.add.Tensor",
                        "inputs": [
                            {"name": name, "kind": 1, "arg": {"as_tensor": {"name": read}}}
                            for name, read in (("self", before), ("other", names[0]))
                        ],
                        "outputs": [{"as_tensor": {"name": made}}],
                        "metadata": {"nn_module_stack": f"k,,M;k{made},b.{number},L"},
                    }
                    for number, (before, made) in enumerate(pairwise(names))
                ],
            },
            "signature": {
                "input_specs": [{"user_input": {"arg": {"as_tensor": {"name": names[0]}}}}],
                "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": names[-1]}}}}],
            },
            "module_call_graph": [],
        },
    }


def test_a_program_has_a_bounded_number_of_operations(monkeypatch):
    assert read_pt2(packed(chain(10)))
    monkeypatch.setattr("stagewright.capture.pt2.subgraphs.MAX_NODES", 10)
    with pytest.raises(InvalidInput, match="more than the 10 operations accepted"):
        read_pt2(packed(chain(11)))


def test_layers_and_what_crosses_between_them_take_linear_time():
    """Cause: each gap between layers looked at every tensor, so 50 KiB took minutes."""
    graph = read_pt2(packed(chain(3)))
    crossing = [[tensor.name for tensor in boundary.tensors] for boundary in graph.boundaries]
    assert crossing == [["t0", "t1"], ["t0", "t2"]]
    begin = time.process_time()
    assert len(read_pt2(packed(chain(4000))).layers) == 4000
    assert time.process_time() - begin < 6.0  # 0.7 s here; 4,000 gaps x 4,000 names took 9


def test_no_mutant_is_anything_but_a_graph_or_refused():
    """A slice of what `scripts/fuzz_pt2.py` reads."""
    outcome = Outcome()
    read_here(1, 150, outcome)
    assert outcome.wrongs == []
    assert sum(outcome.counts.values()) == 150
    assert {how.rpartition(": ")[2] for how in outcome.counts} == {"is a graph", "is refused"}


def test_files_of_other_functions_of_torch_are_named(tmp_path):
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    scripted, weights = tmp_path / "model.pt", tmp_path / "weights.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # releases that deprecate TorchScript say so
        torch.jit.save(torch.jit.trace(module, torch.ones(2, 4)), scripted)
    torch.save(module.state_dict(), weights)
    for path, words in ((scripted, "a TorchScript file"), (weights, "a file of torch.save")):
        # Also as the client sends it, without members of weights.
        for content in (path.read_bytes(), read_pt2_without_weights(path)):
            with pytest.raises(InvalidInput, match=words) as refused:
                read_pt2(content)
            assert "torch.export.save(torch.export.export(module, inputs)" in str(refused.value)
