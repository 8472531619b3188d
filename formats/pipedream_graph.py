"""Read the per-layer profiles of PipeDream (SOSP 2019): its ``graph.txt``.

A node is a line ``<id> -- <description> -- forward_compute_time=<ms>, backward_compute_time=<ms>,
activation_size=<bytes or [bytes; bytes]>, parameter_size=<bytes>``, perhaps with a fourth field
``stage_id=<number>``; an edge is a line that starts with a tab, ``<source> -- <target>``, and
carries its source's activation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from ..core.errors import InvalidInput
from ..core.graph.graph import Boundary, Edge, Layer, Parameter
from ..core.graph.tensors import TensorSpec
from ..core.profile.profile import LayerProfile, Profile, Provenance, SavedStorage, Timing
from ..planner.dag.downsets import Dag

SEPARATOR = " -- "
MS_PER_S = 1000
MAX_BYTES = 2**40
"""Of one activation or of one node's weights; more is taken for a mistake."""

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class PipeDreamNode:
    """One module or operation; times are for one minibatch, activations are its output's bytes."""

    node_id: str
    description: str
    forward_time_s: float
    backward_time_s: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class PipeDreamGraph:
    """A profile as written, in the file's order; acyclic, an edge given twice is kept twice."""

    nodes: tuple[PipeDreamNode, ...]
    edges: tuple[tuple[str, str], ...]


def read_pipedream_graph(path: Path) -> PipeDreamGraph:
    """Parse a PipeDream profile file, or raise `InvalidInput` that names the file and the line."""
    try:
        return parse_pipedream_graph(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def parse_pipedream_graph(data: bytes | str) -> PipeDreamGraph:
    """Parse the content of a PipeDream profile file, or raise `InvalidInput` naming the line."""
    nodes: dict[str, PipeDreamNode] = {}
    edges: dict[tuple[str, str], int] = {}
    repeated: list[tuple[str, str]] = []
    for number, line in enumerate(_text(data).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        # Only the tab tells an edge from a node: both have the separator.
        if line.startswith("\t"):
            edge = _edge(line, number)
            edges.setdefault(edge, number)
            repeated.append(edge)
            continue
        node = _node(line, number)
        if node.node_id in nodes:
            raise InvalidInput(f"line {number}: node {node.node_id!r} is defined twice")
        nodes[node.node_id] = node
    if not nodes:
        raise InvalidInput("line 1: no nodes found; a node is a line '<id> -- <what> -- <costs>'")
    _check_edges(nodes, edges)
    return PipeDreamGraph(tuple(nodes.values()), tuple(repeated))


def _text(data: bytes | str) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(
            f"line {line}: byte {data[error.start]:#04x} is not UTF-8 text"
        ) from error


def _edge(line: str, number: int) -> tuple[str, str]:
    ends = [end.strip() for end in line.split(SEPARATOR.rstrip())]
    if len(ends) != 2 or not all(ends):
        raise InvalidInput(f"line {number}: an edge is '<tab><source> -- <target>', found {line!r}")
    return ends[0], ends[1]


def _node(line: str, number: int) -> PipeDreamNode:
    fields = line.split(SEPARATOR)
    if not 3 <= len(fields) <= 4 or not fields[0].strip():
        raise InvalidInput(
            f"line {number}: a node has an id, a description and costs between ' -- ', and "
            f"perhaps a stage_id; found {len(fields)} fields"
        )
    if len(fields) == 4 and not re.fullmatch(r"stage_id=-?\d+", fields[3].strip()):
        raise InvalidInput(f"line {number}: expected stage_id=<number>, found {fields[3]!r}")
    costs: dict[str, str] = {}
    # Lists of activations are separated by semicolons, so a comma ends a cost.
    for part in fields[2].strip().split(", "):
        name, equals, value = part.partition("=")
        if not equals or name not in FIELDS or name in costs:
            raise InvalidInput(
                f"line {number}: the costs are {', '.join(FIELDS)}, each once and as "
                f"<name>=<number>; found {part!r}"
            )
        costs[name] = value
    missing = [name for name in FIELDS if name not in costs]
    if missing:
        raise InvalidInput(f"line {number}: {missing[0]} is missing")
    return PipeDreamNode(
        node_id=fields[0].strip(),
        description=fields[1],
        forward_time_s=_number(costs, "forward_compute_time", number) / MS_PER_S,
        backward_time_s=_number(costs, "backward_compute_time", number) / MS_PER_S,
        activation_bytes=_bytes(costs, "activation_size", number),
        parameter_bytes=_bytes(costs, "parameter_size", number),
    )


def _bytes(costs: dict[str, str], name: str, line: int) -> float:
    size_bytes = _number(costs, name, line)
    if size_bytes > MAX_BYTES:
        raise InvalidInput(f"line {line}: {name} is {size_bytes:g} bytes, at most {MAX_BYTES}")
    return size_bytes


def _number(costs: dict[str, str], name: str, line: int) -> float:
    """Parse one cost; the parts of an activation list are added up."""
    text = costs[name].strip()
    parts = [text]
    if name == "activation_size" and text.startswith("[") and text.endswith("]"):
        parts = text[1:-1].split(";")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise InvalidInput(f"line {line}: {name} is {text!r}, which is not a number") from None
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise InvalidInput(f"line {line}: {name} is {value}; costs are finite, not negative")
    return math.fsum(values)


def _check_edges(nodes: Iterable[str], edges: dict[tuple[str, str], int]) -> None:
    before: dict[str, list[str]] = {node_id: [] for node_id in nodes}
    for (source, target), number in edges.items():
        for end in (source, target):
            if end not in before:
                raise InvalidInput(f"line {number}: there is no node {end!r}")
        before[target].append(source)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        # Blame the last line of the cycle: until then the file was sound.
        number = max(edges[pair] for pair in pairwise(cycle))
        shown = " -> ".join(cycle[:8]) + (" -> ..." if len(cycle) > 8 else "")
        raise InvalidInput(f"line {number}: this edge closes a cycle: {shown}") from None


def drop_inputs_and_unused(graph: PipeDreamGraph) -> PipeDreamGraph:
    """Drop what PipeDream's optimizer leaves out: data loading and unread results.

    Sources whose description begins with ``Input`` go first; of what is left, the sinks whose
    description begins with ``__getitem__``.
    """
    graph = _without(graph, "Input", {target for _, target in graph.edges})
    graph = _without(graph, "__getitem__", {source for source, _ in graph.edges})
    if not graph.nodes:
        raise InvalidInput("line 1: all nodes are inputs or unused parts of results")
    return graph


def _without(graph: PipeDreamGraph, prefix: str, used: set[str]) -> PipeDreamGraph:
    """Drop nodes whose description begins with ``prefix``, except those used, and their edges."""
    gone = {
        node.node_id
        for node in graph.nodes
        if node.description.startswith(prefix) and node.node_id not in used
    }
    return PipeDreamGraph(
        tuple(node for node in graph.nodes if node.node_id not in gone),
        tuple(edge for edge in graph.edges if gone.isdisjoint(edge)),
    )


def to_profile(graph: PipeDreamGraph) -> Profile:
    """Convert to a profile: one layer per node, without data loading.

    Layers are in the topological order that takes the lowest number in an id first. A boundary
    lists the output of every layer in front of it that a layer behind it reads, once; outputs
    that nothing reads are not sent. Each layer keeps its output until backward. Fractions of a
    byte count as a whole one.
    """
    graph = drop_inputs_and_unused(graph)
    # Of nodes that are ready, `Dag.order` takes the lowest number first.
    by_number = sorted(graph.nodes, key=lambda node: (_trailing_number(node.node_id), node.node_id))
    numbers = {node.node_id: number for number, node in enumerate(by_number)}
    dag = Dag(len(numbers), tuple((numbers[a], numbers[b]) for a, b in graph.edges))
    nodes = [by_number[number] for number in dag.order]
    positions = {node.node_id: position for position, node in enumerate(nodes)}
    pairs = sorted({(positions[source], positions[target]) for source, target in graph.edges})
    return Profile(
        layers=tuple(_layer(node) for node in nodes),
        boundaries=_boundaries(nodes, pairs),
        edges=tuple(
            Edge(source=source, target=target, tensor=_output(nodes[source]))
            for source, target in pairs
        ),
        parameters=tuple(
            _parameter(node, position)
            for position, node in enumerate(nodes)
            if node.parameter_bytes
        ),
        storages=tuple(
            SavedStorage(size_bytes=math.ceil(node.activation_bytes), layers=(position,))
            for position, node in enumerate(nodes)
            if node.activation_bytes
        ),
        provenance=Provenance(device="unknown"),
        notes=("read from a PipeDream profile; times are for one minibatch of its measurement",),
    )


def _trailing_number(node_id: str) -> int:
    digits = re.search(r"\d{1,18}$", node_id)
    return int(digits[0]) if digits else 0


def _layer(node: PipeDreamNode) -> LayerProfile:
    size_bytes = math.ceil(node.activation_bytes)
    return LayerProfile(
        layer=Layer(
            name=node.node_id,
            module_type=node.description.partition("(")[0].strip(),
            module_fqns=(node.node_id,) if node.parameter_bytes else (),
            parameter_bytes=math.ceil(node.parameter_bytes),
        ),
        forward=Timing(median_s=node.forward_time_s),
        backward=Timing(median_s=node.backward_time_s),
        saved_activation_bytes=size_bytes,
        output_bytes=size_bytes,
    )


def _parameter(node: PipeDreamNode, position: int) -> Parameter:
    size_bytes = math.ceil(node.parameter_bytes)
    return Parameter(
        names=(f"{node.node_id}.weight",),
        size_bytes=size_bytes,
        # The file has bytes only; weights are taken to be float32.
        numel=size_bytes // 4,
        layers=(position,),
    )


def _boundaries(nodes: list[PipeDreamNode], pairs: list[tuple[int, int]]) -> tuple[Boundary, ...]:
    last_reader: dict[int, int] = {}
    for source, target in pairs:
        last_reader[source] = max(target, last_reader.get(source, target))
    return tuple(
        Boundary(
            after=after,
            tensors=tuple(
                _output(nodes[source])
                for source, reader in sorted(last_reader.items())
                if source <= after < reader
            ),
        )
        for after in range(len(nodes) - 1)
    )


def _output(node: PipeDreamNode) -> TensorSpec:
    """Describe a node's output by its bytes; a gradient of equal size flows back."""
    return TensorSpec(
        name=node.node_id,
        # No shapes in the file either: as many elements of one byte.
        shape=(math.ceil(node.activation_bytes),),
        dtype="uint8",
        requires_grad=True,
    )
