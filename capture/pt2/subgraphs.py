"""Inlining of the nested graphs that ``torch.no_grad`` and disabled autocast leave behind.

torch.export turns such a block into a higher-order operator that takes a graph as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.document import MAX_NAME
from ...core.errors import InvalidInput

SET_GRAD_ENABLED = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
MAX_NODES = 200_000

CAPTURE_INSTEAD = "create the graph with 'stagewright capture' where the model is, and send that"


def inline_subgraphs(graph: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all nodes of a graph and its nested graphs, and all tensor metadata by name."""
    tensors = dict(graph["tensor_values"])
    nodes = []
    # Counted while inlining, because nested graphs can multiply far beyond the JSON's size.
    for node in _walk(graph["nodes"], {}, tensors):
        nodes.append(node)
        if len(nodes) > MAX_NODES:
            raise InvalidInput(f"the program has more than the {MAX_NODES} operations accepted")
    return nodes, tensors


def _walk(
    nodes: list[dict[str, Any]], names: Mapping[str, str], tensors: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for node in nodes:
        renamed = _rename(node, names)
        if node["target"] in (SET_GRAD_ENABLED, AUTOCAST):
            yield from _inline(renamed, tensors)
        else:
            yield renamed


def _inline(node: dict[str, Any], tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = [entry["arg"] for entry in node["inputs"]]
    position = next(index for index, entry in enumerate(given) if "as_graph" in entry)
    # Arguments of wrap_with_autocast: device type, dtype, enabled, cache, graph, operands.
    if node["target"] == AUTOCAST and given[2].get("as_bool") is not False:
        raise InvalidInput(
            "the program runs under autocast; export the model without it, converted to the data "
            "type it is to run in"
        )
    graph = given[position]["as_graph"]["graph"]
    results = [
        entry["name"]
        for output in node["outputs"]
        for entry in (output["as_tensors"] if "as_tensors" in output else [output["as_tensor"]])
    ]
    # Names are unique per graph only, so inner ones get the first result's name as a prefix;
    # the inner graph's inputs stand for the operands and take over their names.
    outer = [entry["as_tensor"]["name"] for entry in given[position + 1 :]]
    inner = [entry["as_tensor"]["name"] for entry in graph["inputs"]]
    names = {name: f"{results[0]}__{name}" for name in graph["tensor_values"]}
    # Checked here, too: graphs nested in one another make names of all of theirs.
    if any(len(name) > MAX_NAME for name in names.values()):
        raise InvalidInput(f"the program has names of more than {MAX_NAME} characters")
    tensors.update({names[name]: meta for name, meta in graph["tensor_values"].items()})
    names |= dict(zip(inner, outer, strict=True))
    yield from _walk(graph["nodes"], names, tensors)
    ends = [names[entry["as_tensor"]["name"]] for entry in graph["outputs"]]
    # set_grad_enabled(False) shows in the inlined graph as a detach of every result.
    stops = node["target"] == SET_GRAD_ENABLED and given[0].get("as_bool") is False
    metadata = graph["nodes"][-1]["metadata"] if graph["nodes"] else {}
    for result, end in zip(results, ends, strict=True):
        yield {
            "target": f"torch.ops.aten.{'detach' if stops else 'alias'}.default",
            "inputs": [{"name": "self", "arg": {"as_tensor": {"name": end}}, "kind": 1}],
            "outputs": [{"as_tensor": {"name": result}}],
            "metadata": metadata,
        }


def _rename(value: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a node with its tensors renamed, nested graphs excepted."""
    if not names:
        return value
    if isinstance(value, dict):
        return {
            key: _rename_tensors(item, names)
            if key in ("as_tensor", "as_tensors")
            else (item if key == "as_graph" else _rename(item, names))
            for key, item in value.items()
        }
    return [_rename(item, names) for item in value] if isinstance(value, list) else value


def _rename_tensors(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_rename_tensors(item, names) for item in value]
    return {"name": names.get(value["name"], value["name"])}
