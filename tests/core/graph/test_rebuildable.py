"""Graphs from strangers: whatever is not on the list is refused on reading, without torch."""

import json

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.graph import rebuildable
from stagewright.core.graph.graph import Graph

TENSOR = {"shape": [2, 4], "dtype": "float32"}
OUT = [{"name": "relu", **TENSOR}]

GRAPH = {
    "model": "Small",
    "mode": "export",
    "inputs": [{"name": "x", **TENSOR}],
    "outputs": [{"name": "scale", **TENSOR}],
    "layers": [{"name": "fc"}, {"name": "act"}],
    "boundaries": [{"after": 0, "tensors": [{"name": "fc", **TENSOR}]}],
    "operations": [
        {
            "name": "fc", "target": "fc", "kind": "module", "layer": 0,
            "outputs": [{"name": "fc", **TENSOR}], "arguments": [{"input": "x"}],
        },
        {
            "name": "relu", "target": "aten.relu.default", "kind": "function", "layer": 1,
            "outputs": OUT, "arguments": [{"node": "fc"}],
        },
        {
            "name": "scale", "target": "aten.mul.Tensor", "kind": "function", "layer": 1,
            "outputs": OUT, "arguments": [{"node": "relu"}, {"state": "factor"}],
        },
    ],
    "rebuildable": True,
    "modules": [
        {"name": "fc", "type": "Linear", "settings": {"in_features": 4, "out_features": 4}}
    ],
    "state": [
        {"names": ["fc.weight"], "shape": [4, 4], "dtype": "float32"},
        {"names": ["fc.bias"], "shape": [4], "dtype": "float32"},
        {
            "names": ["factor"], "shape": [4], "dtype": "float32", "kind": "constant",
            "fill": {"kind": "values", "values": [1.0, 2.0, 3.0, 4.0]},
        },
    ],
    "returns": [{"node": "scale"}],
    "output_paths": [[]],
    "input_structure": '{"positional": ["x"], "keyword": []}',
    "sample": {"inputs": {"x": {"shape": [2, 4]}}},
}  # fmt: skip


def changed(path, value):
    """The graph with one value replaced; a path is keys and positions."""
    document = json.loads(json.dumps(GRAPH))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document)


def test_the_graph_itself_is_read():
    assert Graph.from_json(json.dumps(GRAPH)).rebuildable


OPERATION = ["operations", 1]

LSTM = {"name": "fc", "type": "LSTM"}

REFUSED = [
    ([*OPERATION, "target"], "aten.from_file.default", "not on the list"),
    ([*OPERATION, "target"], "builtins.eval", "not on the list"),
    ([*OPERATION, "kind"], "attribute", "not on the list"),
    ([*OPERATION, "target"], "region_of_mine", "not on the list"),
    ([*OPERATION, "name"], "x = print(1)", "must match"),
    ([*OPERATION, "name"], "fc", "two operations"),
    ([*OPERATION, "layer"], 2, "there are 2 layers"),
    ([*OPERATION, "arguments"], [{"node": "scale"}], "no earlier operation"),
    ([*OPERATION, "arguments"], [{"input": "y"}], "not an input"),
    ([*OPERATION, "arguments"], [{"state": "fc.bias2"}], "not in the state"),
    ([*OPERATION, "arguments"], [{"code": "1"}], "/operations/1/arguments/0"),
    ([*OPERATION, "arguments"], ["__import__('os')"], "/operations/1/arguments/0"),
    ([*OPERATION, "keywords"], {"a b": 1}, "must match"),
    ([*OPERATION, "keywords"], {"lambda": 1}, "a Python keyword"),
    ([*OPERATION, "outputs", 0, "shape"], [2**30, 2**30], "at most"),
    (["modules", 0, "type"], "Module", "which a graph may not call"),
    (["modules", 0, "type"], "os.system", "which a graph may not call"),
    (["modules", 0, "settings", "device"], "cuda", "does not accept 'device'"),
    (["modules", 0, "settings", "in_features"], 2**40, "at most"),
    (["modules", 0], {**LSTM, "settings": {"num_layers": 129}}, "at most 128"),
    (["modules", 0], {**LSTM, "settings": {"num_layers": 2}}, "lists only 2"),
    (["modules", 0], {**LSTM, "settings": {"num_layers": "x"}}, "not an integer"),
    (["modules", 0, "name"], 'fc"]; evil', "must match"),
    (["state", 0, "names"], ["fc.weight", "fc.bias"], "two tensors"),
    (["state", 0, "names"], ["fc"], "there is no"),
    (["state", 0, "names"], ["a'); evil"], "must match"),
    (["state", 0, "shape"], [2**30, 2**30], "at most"),
    (["state", 0, "strides"], [1], "but 1 strides"),
    (["state", 0, "strides"], [2**30, 1], "unused"),
    (["state", 2, "fill"], None, "needs a fill"),
    (["state", 2, "fill", "values"], [1.0], "has 1 values"),
    (["state", 2, "fill"], {"kind": "integers", "low": 3, "high": 3}, "below high"),
    (["state", 2, "fill"], {"kind": "causal"}, "two dimensions"),
    (["state", 2, "fill"], {"kind": "file", "path": "/etc/passwd"}, "/state/2/fill"),
    (["inputs", 0, "name"], "x y", "must match"),
    (["inputs", 0, "name"], "lambda", "a Python keyword"),
    (["inputs", 0, "name"], "None", "a Python keyword"),
    (["inputs", 0, "name"], "__debug__", "a Python keyword"),
    (["sample"], None, "needs a sample"),
    (["sample", "inputs", "x", "shape"], [2, 5], "differs from the input"),
    (["sample", "inputs"], {"y": {"shape": [2, 4]}}, "differ from the graph's"),
    (["output_paths"], [], "1 returned values but 0 output paths"),
    (["returns"], [{"node": "nothing"}], "no earlier operation"),
    (["weights"], "gAJ9cQ==", "/weights"),
]


@pytest.mark.parametrize(("path", "value", "said"), REFUSED)
def test_what_is_not_allowed_is_refused_and_named(path, value, said):
    with pytest.raises(InvalidInput, match=said):
        Graph.from_json(changed(path, value))


def region(**fields):
    inside = {
        "name": "inner", "target": "aten.relu.default", "kind": "function", "layer": 1,
        "arguments": [{"node": "given"}],
    }  # fmt: skip
    made = {
        "name": "quiet", "kind": "no_grad", "inputs": ["given"], "operations": [inside],
        "returns": [{"node": "inner"}],
    }  # fmt: skip
    document = json.loads(json.dumps(GRAPH))
    document["regions"] = [{**made, **fields}]
    document["operations"][1] |= {"kind": "region", "target": "quiet"}
    return document


def test_regions_hold_operators_on_what_they_are_given():
    assert Graph.from_json(json.dumps(region())).rebuildable
    deeper = region()
    deeper["regions"][0]["operations"][0] |= {"kind": "region", "target": "quiet"}
    state = region()
    state["regions"][0]["operations"][0]["arguments"] = [{"state": "factor"}]
    outer = region()
    outer["regions"][0]["operations"][0]["arguments"] = [{"node": "fc"}]
    for document, said in [
        (region(inputs=["given", "other"]), "takes 2 arguments, not 1"),
        (region(inputs=["lambda"]), "a Python keyword"),
        (deeper, "only operators applied"),
        (state, "only operators applied"),
        (outer, "no earlier operation"),
    ]:
        with pytest.raises(InvalidInput, match=said):
            Graph.from_json(json.dumps(document))


def test_a_region_is_checked_once_however_often_it_is_called(monkeypatch):
    """Reading took time by the number of calls times the length of the region."""
    document = region()
    call = document["operations"][1]
    for number in range(20):
        document["operations"].append({**call, "name": f"again_{number}"})
    looked_at = []
    monkeypatch.setattr(
        rebuildable, "_items", lambda operation: looked_at.append(operation.name) or ()
    )
    assert Graph.from_json(json.dumps(document)).rebuildable
    assert looked_at == ["inner"]


def test_a_graph_without_operations_is_read():
    names = ("model", "mode", "inputs", "outputs", "layers", "boundaries")
    few = {name: GRAPH[name] for name in names}
    read = Graph.from_json(json.dumps(few))
    assert not read.rebuildable
    assert read.not_rebuildable == ()
