"""A graph's layers and edges in networkx."""

from __future__ import annotations

import networkx

from stagewright.core.graph.graph import MODEL_INPUT, Boundary, Edge, Graph, Layer
from stagewright.core.graph.tensors import TensorSpec


def test_layers_are_nodes_and_tensors_edges():
    x, y, z = (TensorSpec(name=name, shape=(2,), dtype="float32") for name in "xyz")
    layers = tuple(Layer(name=name) for name in ("in", "left", "out"))
    edges = tuple(
        Edge(source=source, target=target, tensor=tensor)
        for source, target, tensor in ((-1, 0, x), (0, 1, y), (0, 2, y), (0, 2, z), (1, 2, z))
    )
    boundaries = tuple(Boundary(after=after) for after in range(2))
    graph = Graph(
        model="M", mode="trace", inputs=(x,), outputs=(z,), layers=layers, edges=edges,
        boundaries=boundaries,
    )  # fmt: skip
    found = graph.to_networkx()
    assert found.name == "M"
    assert {node: found.nodes[node]["layer"] for node in range(3)} == dict(enumerate(layers))
    assert sorted(found.edges()) == [(-1, 0), (0, 1), (0, 2), (0, 2), (1, 2)]
    assert {data["tensor"].name for _, _, data in found.edges(0, data=True)} == {"y", "z"}
    assert list(networkx.topological_sort(found)) == [MODEL_INPUT, 0, 1, 2]
    assert networkx.dag_longest_path_length(networkx.DiGraph(found.edges())) == 3
