"""Graphs inside a graph, written out: what an exported program runs without gradients.

Such a part becomes plain operations with names of their own, its results detached, so that no
gradient flows through it. Autocast that is off changes nothing; autocast that is on is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import InvalidInput

NO_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
MAX_NODES = 200_000


def inlined(graph: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Nodes and tensors of a program's graph, with those of the graphs inside it.

    Raises:
        InvalidInput: There is autocast, or there are too many nodes.
        KeyError, TypeError: It is not as torch.export writes it.
    """
    values = dict(graph["tensor_values"])
    nodes = []
    for node in _nodes(graph["nodes"], {}, values):
        nodes.append(node)
        if len(nodes) > MAX_NODES:
            raise InvalidInput(f"the program has more than the {MAX_NODES} operations accepted")
    return nodes, values


def _nodes(
    nodes: list[dict[str, Any]], names: Mapping[str, str], values: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for node in nodes:
        renamed = _renamed(node, names)
        if node["target"] in (NO_GRADIENTS, AUTOCAST):
            yield from _inside(renamed, values)
        else:
            yield renamed


def _inside(node: dict[str, Any], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = [entry["arg"] for entry in node["inputs"]]
    position = next(index for index, entry in enumerate(given) if "as_graph" in entry)
    if node["target"] == AUTOCAST and given[2].get("as_bool") is not False:
        raise InvalidInput(
            "the program runs under autocast; export the model without it, converted to the type "
            "it is to run in"
        )
    graph = given[position]["as_graph"]["graph"]
    outputs = node["outputs"]
    made = [
        entry["name"]
        for output in outputs
        for entry in (output["as_tensors"] if "as_tensors" in output else [output["as_tensor"]])
    ]
    outer = [entry["as_tensor"]["name"] for entry in given[position + 1 :]]
    inner = [entry["as_tensor"]["name"] for entry in graph["inputs"]]
    names = {name: f"{made[0]}__{name}" for name in graph["tensor_values"]}
    values.update({names[name]: meta for name, meta in graph["tensor_values"].items()})
    names |= dict(zip(inner, outer, strict=True))
    yield from _nodes(graph["nodes"], names, values)
    ends = [names[entry["as_tensor"]["name"]] for entry in graph["outputs"]]
    stops = node["target"] == NO_GRADIENTS and given[0].get("as_bool") is False
    metadata = graph["nodes"][-1]["metadata"] if graph["nodes"] else {}
    for result, end in zip(made, ends, strict=True):
        yield {
            "target": f"torch.ops.aten.{'detach' if stops else 'alias'}.default",
            "inputs": [{"name": "self", "arg": {"as_tensor": {"name": end}}, "kind": 1}],
            "outputs": [{"as_tensor": {"name": result}}],
            "metadata": metadata,
        }


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same with other names of tensors, down to the graphs inside."""
    if not names:
        return value
    if isinstance(value, dict):
        return {
            key: _tensor(item, names)
            if key in ("as_tensor", "as_tensors")
            else (item if key == "as_graph" else _renamed(item, names))
            for key, item in value.items()
        }
    return [_renamed(item, names) for item in value] if isinstance(value, list) else value


def _tensor(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_tensor(item, names) for item in value]
    return {"name": names.get(value["name"], value["name"])}
