"""PipeDream's profiles: what is read, what is refused, what a profile of ours makes of it."""

import random

import pytest

from benchmarks.pipedream_study.graphs import pipedream_split, pipedream_value, to_cost_graph
from stagewright.core.errors import InvalidInput
from stagewright.formats.pipedream_graph import (
    drop_inputs_and_unused,
    parse_pipedream_graph,
    read_pipedream_graph,
    to_profile,
)


def node(number, what="ReLU(inplace)", forward=1.0, backward=2.0, activation="8.000", weights=0.0):
    return (
        f"node{number} -- {what} -- forward_compute_time={forward:.3f}, "
        f"backward_compute_time={backward:.3f}, activation_size={activation}, "
        f"parameter_size={weights:.3f}"
    )


def edge(source, target):
    return f"\tnode{source} -- node{target}"


SMALL = "\n".join(
    [
        node(10, "Linear(3, 4, bias=True)", 1.5, 2.5, "16.000", 48),
        node(1, "Input0", 600.0, 0.0),
        node(2, "Embedding(9, 3)", 0.5, 0.25, "12.0", 108),
        node(4, "LSTM(3, 3)", 3.0, 4.0, "[12.0; 6.0; 6.0]", 80),
        node(5, "__getitem__(0)", 0.0, 0.0, "12.0"),
        node(6, "__getitem__(1)", 0.0, 0.0, "6.0"),
        node(9, "Add", 0.0, 0.0, "12.0"),
        edge(1, 2), edge(2, 4), edge(4, 5), edge(4, 6), edge(5, 9), edge(2, 9), edge(9, 10),
    ]
)  # fmt: skip


def test_nodes_are_read_in_the_files_order_and_in_seconds():
    graph = parse_pipedream_graph(SMALL)
    assert [entry.node_id for entry in graph.nodes][:3] == ["node10", "node1", "node2"]
    first = graph.nodes[0]
    assert first.description == "Linear(3, 4, bias=True)"
    assert (first.forward_time_s, first.backward_time_s) == (0.0015, 0.0025)
    assert (first.activation_bytes, first.parameter_bytes) == (16, 48)
    assert graph.nodes[3].activation_bytes == 24, "parts of a result are added up"
    assert graph.edges[0] == ("node1", "node2")


def test_inputs_and_parts_nobody_reads_go():
    graph = drop_inputs_and_unused(parse_pipedream_graph(SMALL))
    assert [entry.node_id for entry in graph.nodes] == [
        "node10",
        "node2",
        "node4",
        "node5",
        "node9",
    ]
    assert ("node4", "node6") not in graph.edges
    assert ("node4", "node5") in graph.edges


def test_only_sources_called_input_and_sinks_called_getitem_go():
    text = "\n".join(
        [node(1, "Conv"), node(2, "InputNorm"), node(3, "__getitem__(0)"), node(4, "View"),
         edge(1, 2), edge(2, 3), edge(3, 4)]
    )  # fmt: skip
    graph = parse_pipedream_graph(text)
    assert drop_inputs_and_unused(graph) == graph


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_blank_lines_stage_ids_and_edges_in_front_are_taken(ending):
    lines = [edge(1, 2), "", node(1) + " -- stage_id=0", "   ", node(2) + " -- stage_id=1", ""]
    graph = parse_pipedream_graph(ending.join(lines).encode())
    assert graph.edges == (("node1", "node2"),)
    assert len(graph.nodes) == 2


def test_a_profile_has_a_layer_a_node_in_order_of_ids():
    profile = to_profile(parse_pipedream_graph(SMALL))
    layers = profile.layers
    assert [entry.layer.name for entry in layers] == ["node2", "node4", "node5", "node9", "node10"]
    assert layers[0].layer.module_type == "Embedding"
    assert (layers[0].forward.median_s, layers[0].backward.median_s) == (0.0005, 0.00025)
    assert [entry.saved_activation_bytes for entry in layers] == [12, 24, 12, 12, 16]
    assert [
        (entry.names[0], entry.size_bytes, entry.numel, entry.layers)
        for entry in profile.parameters
    ] == [
        ("node2.weight", 108, 27, (0,)),
        ("node4.weight", 80, 20, (1,)),
        ("node10.weight", 48, 12, (4,)),
    ]


def test_boundaries_list_what_is_read_behind_them_once():
    profile = to_profile(parse_pipedream_graph(SMALL))
    assert [
        [(tensor.name, tensor.size_bytes) for tensor in boundary.tensors]
        for boundary in profile.boundaries
    ] == [
        [("node2", 12)],
        [("node2", 12), ("node4", 24)],
        [("node2", 12), ("node5", 12)],
        [("node9", 12)],
    ]
    assert all(entry.backward_bytes == entry.forward_bytes for entry in profile.boundaries)
    assert [(entry.source, entry.target, entry.tensor.name) for entry in profile.edges] == [
        (0, 1, "node2"), (0, 3, "node2"), (1, 2, "node4"), (2, 3, "node5"), (3, 4, "node9")
    ]  # fmt: skip


def test_the_profile_survives_its_document():
    profile = to_profile(parse_pipedream_graph(SMALL))
    assert type(profile).model_validate_json(profile.model_dump_json()) == profile


def test_what_is_read_can_be_planned():
    graph = to_cost_graph(parse_pipedream_graph(SMALL))
    split = pipedream_split(graph, [2, 2], [1e6, 1e5])
    value_s = pipedream_value(graph, split.stages, [2, 2], [1e6, 1e5])
    assert value_s == pytest.approx(split.value_s, rel=1e-12)
    placed = [name for stage in split.stages for name in stage.node_ids]
    assert sorted(placed) == sorted(graph.node_ids)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: no nodes found"),
        ("\n\n  \n", "line 1: no nodes found"),
        (b"node1 -- x\n\xff\xfe", "line 2: byte 0xff is not UTF-8"),
        ("nonsense", "line 1: a node has an id, a description and costs"),
        (node(1) + "\n" + node(1), "line 2: node 'node1' is defined twice"),
        (node(1, forward=float("nan")), "line 1: forward_compute_time is nan"),
        (node(1, backward=float("inf")), "line 1: backward_compute_time is inf"),
        (node(1, forward=-1), "line 1: forward_compute_time is -1.0"),
        (node(1, weights=-4), "line 1: parameter_size is -4.0"),
        (node(1, weights=2.0**41), "line 1: parameter_size is 2.19902e[+]12 bytes, at most"),
        (node(1, activation="[1.0; x]"), "line 1: activation_size is '.1.0; x.', which is not"),
        (node(1, activation="[1.0; -2.0]"), "line 1: activation_size is -2.0"),
        (node(1, activation="[]"), "line 1: activation_size is '..', which is not a number"),
        (node(1, activation=""), "line 1: activation_size is '', which is not a number"),
        (node(1).replace("backward", "forward"), "each once"),
        (node(1).replace("parameter_size=", "weights="), "found 'weights=0.000'"),
        (node(1).rpartition(", ")[0], "line 1: parameter_size is missing"),
        (node(1) + " -- stage=1", "line 1: expected stage_id=<number>, found 'stage=1'"),
        (node(1) + "\n\tnode1", "line 2: an edge is"),
        (node(1) + "\n\tnode1 -- node2 -- node3", "line 2: an edge is"),
        (node(1) + "\n\tnode1 -- ", "line 2: an edge is"),
        (node(1) + "\n\n" + edge(1, 7), "line 3: there is no node 'node7'"),
        (node(1) + "\n" + edge(1, 1), "line 2: this edge closes a cycle: node1 -> node1"),
        (
            "\n".join([node(1), node(2), node(3), edge(1, 2), edge(2, 3), edge(3, 2)]),
            "line 6: this edge closes a cycle: node",
        ),
    ],
)
def test_malformed_files_are_refused_with_the_line(text, said):
    with pytest.raises(InvalidInput, match=said):
        parse_pipedream_graph(text)


@pytest.mark.parametrize("convert", [to_cost_graph, to_profile, drop_inputs_and_unused])
def test_a_file_of_inputs_alone_is_refused(convert):
    graph = parse_pipedream_graph("\n".join([node(1, "Input0"), node(2, "Input1")]))
    with pytest.raises(InvalidInput, match="all nodes are inputs"):
        convert(graph)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "graph.txt"
    with pytest.raises(InvalidInput, match=r"cannot read .*graph\.txt"):
        read_pipedream_graph(path)
    path.write_text(node(1) + "\n" + edge(1, 2))
    with pytest.raises(InvalidInput, match=r"graph\.txt: line 2: there is no node"):
        read_pipedream_graph(path)


@pytest.mark.parametrize("seed", range(200))
def test_damaged_files_are_read_or_refused_and_nothing_else(seed):
    draw = random.Random(seed)
    data = bytearray(SMALL.encode())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data))
        if draw.random() < 0.5:
            data[place] = draw.randrange(256)
        else:
            del data[place : place + draw.randrange(1, 60)]
    said = "line "
    try:
        to_profile(parse_pipedream_graph(bytes(data)))
    except InvalidInput as error:
        said = str(error)
    assert "line " in said
