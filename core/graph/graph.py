"""A captured model as data: layers, operations, and what flows between them. No weights."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..document import CompactRecord, Document, LongTuple, Name, NonEmptyTuple, Note, Notes, Record
from ..text_table import format_table, sanitize, truncate
from ..units import count, format_bytes
from .arguments import Argument, Arguments, Path, Setting
from .rebuildable import check_rebuildable
from .tensors import DType, Sample, StateTensor, TensorSpec

if TYPE_CHECKING:
    import networkx

MODEL_INPUT = -1
"""Layer index that stands for the model's own inputs in an `Edge`."""

ChainBreak = Annotated[Note | None, Field(exclude_if=lambda value: value is None)]
"""See `Graph.chain_break`."""

CaptureMode = Literal["sequential", "export", "trace", "dynamo", "sample", "modules"]


class Operation(CompactRecord):
    """One node of the graph in execution order.

    Attributes:
        name: Unique within the graph.
        target: What is called: a module's name, an operator such as ``aten.add.Tensor``,
            ``getitem``, or a region's name.
        kind: ``module`` (a leaf module called whole), ``function``, ``attribute`` or ``region``
            (operations under another gradient or autocast mode).
        inputs: Names of the operations and model inputs read.
        outputs: The tensors produced.
        layer: Index of the layer it belongs to; of constants, which every layer that reads them
            computes for itself, the first one.
        arguments: In order; only in a graph that can be rebuilt.
        keywords: Likewise, by name.
    """

    name: Name
    target: Name
    kind: Literal["module", "function", "attribute", "region"]
    inputs: LongTuple[Name] = ()
    outputs: LongTuple[TensorSpec] = ()
    layer: int = Field(ge=0)
    arguments: Arguments = ()
    keywords: dict[Name, Argument] = Field(default_factory=dict)


class LeafModule(Record):
    """A module called whole, as its constructor's arguments.

    Attributes:
        name: Fully qualified name; its parameters and buffers are ``<name>.<...>``.
        type: Class name, one of `operations.MODULES`.
        settings: Constructor arguments that differ from their defaults.
        training: The mode it was captured in.
    """

    name: Name
    type: Name
    settings: dict[Name, Setting] = Field(default_factory=dict)
    training: bool = True


class Region(Record):
    """Operations that run under another gradient or autocast mode than those around them.

    Attributes:
        name: What the operation that runs it has as its target.
        kind: ``no_grad``, ``enable_grad`` or ``autocast``.
        enabled: Whether autocast is on inside.
        dtype: Of autocast.
        inputs: Names the operations inside have for the arguments given, in order.
        operations: In execution order.
        returns: What it hands out, to be taken apart by ``getitem``.
    """

    name: Name
    kind: Literal["no_grad", "enable_grad", "autocast"]
    enabled: bool = True
    dtype: DType | None = None
    inputs: LongTuple[Name] = ()
    operations: LongTuple[Operation] = ()
    returns: Arguments = ()


class NotRebuildable(Record):
    """Reason why a graph cannot be run without its model's code.

    Attributes:
        operation: Name of the operation to blame; empty if none is.
        layer: Name of its layer.
        reason: What it is, in words.
    """

    operation: Name = ""
    layer: Name = ""
    reason: Note


class Layer(Record):
    """The smallest unit a planner may move: a contiguous run of operations of one module.

    Attributes:
        name: The module's fully qualified name as its author wrote it (``transformer.h.3``);
            later runs of a module called again carry ``@1``, ``@2``.
        module_type: Class name of that module.
        module_fqns: Modules with parameters or buffers used here.
        parameter_bytes: Bytes of the distinct parameters used here.
        opaque: Why the module runs as its author wrote it instead of as traced operations; empty
            for a traced layer.
        stateful: The state in Python that its calls change and keep, such as ``block.calls``, of a
            layer that runs as its author wrote it; empty if none. Such a layer must see all
            micro-batches, each once and in order: no replicas, no recomputation.
        cost_class: Equal for layers of one model that cost the same; empty if not known.
    """

    name: Name
    module_type: Name = ""
    module_fqns: LongTuple[Name] = ()
    parameter_bytes: int = Field(0, ge=0, le=2**60)
    opaque: Note = ""
    stateful: Note = ""
    cost_class: Name = ""


class Edge(Record):
    """A tensor made by layer ``source`` (or `MODEL_INPUT`) and read by layer ``target``."""

    source: int = Field(ge=MODEL_INPUT)
    target: int = Field(ge=0)
    tensor: TensorSpec


class Boundary(Record):
    """Tensors that are live after layer ``after``, which a cut there must send.

    Tensors needed further on are relayed through every stage in between, so they are listed at
    every boundary they cross.

    Attributes:
        after: Index of the layer in front of the boundary.
        tensors: Live tensors, those needing a gradient marked ``requires_grad``.
        legal: Whether a cut may be made here.
        reason: Why not, when it may not.
    """

    after: int = Field(ge=0)
    tensors: LongTuple[TensorSpec] = ()
    legal: bool = True
    reason: Note = ""

    @property
    def forward_bytes(self) -> int:
        """Return the bytes of activations sent forward per micro-batch."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def backward_bytes(self) -> int:
        """Return the bytes of gradients sent back per micro-batch."""
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.requires_grad)


class Parameter(Record):
    """A parameter or buffer, under every name it goes by (tied weights have several).

    Attributes:
        names: All fully qualified names, the canonical one first.
        size_bytes: Its storage.
        numel: Number of elements.
        layers: Indices of the layers that use it, ascending; empty if none does.
        kind: ``parameter`` or ``buffer``.
        trainable: Whether it requires a gradient.
    """

    names: NonEmptyTuple[Name]
    size_bytes: int = Field(ge=0)
    numel: int = Field(0, ge=0)
    layers: LongTuple[int] = ()
    kind: Literal["parameter", "buffer"] = "parameter"
    trainable: bool = True


class Graph(Document):
    """A model captured at one input shape.

    Attributes:
        model: Class name of the model.
        mode: How it was captured: ``sequential`` (children are layers), ``export``, ``trace``
            (symbolic), ``dynamo`` (bytecode), ``sample`` (one run, valid for that sample's values
            only) or ``modules`` (modules called whole).
        training: Whether it was captured in training mode.
        inputs: Flat tensor inputs, in order.
        outputs: Flat tensor outputs, in order.
        boundaries: One per gap between consecutive layers.
        fixed_mode: What stays in training mode however the model is switched; empty if nothing.
        chain_break: Where the model is no chain of its layers' modules, each called with just what
            the one before returned; empty if it is one, `None` if that is not known.
        notes: What a reader should know, e.g. that the batch size is fixed.
        rebuildable: Whether it holds all that is needed to run it with random weights; if not,
            the fields below it are empty but for the reasons.
        not_rebuildable: What stands in the way.
        modules: Every leaf module that is called.
        state: Every parameter, buffer and constant.
        regions: What operations of kind ``region`` run.
        returns: Flat values the model returns.
        output_paths: Where each of them sits; ``()`` where the model returns it alone.
        input_structure: How the model is called (see `capture.sample`).
        sample: Inputs to measure with.
    """

    SCHEMA: ClassVar[str] = "stagewright.graph/1"

    schema_version: Literal["stagewright.graph/1"] = "stagewright.graph/1"
    model: Name
    mode: CaptureMode
    training: bool = True
    inputs: LongTuple[TensorSpec]
    outputs: LongTuple[TensorSpec]
    layers: NonEmptyTuple[Layer]
    edges: LongTuple[Edge] = ()
    boundaries: LongTuple[Boundary] = ()
    parameters: LongTuple[Parameter] = ()
    operations: LongTuple[Operation] = ()
    fixed_mode: Notes = ()
    chain_break: ChainBreak = None
    notes: Notes = ()
    rebuildable: bool = False
    not_rebuildable: LongTuple[NotRebuildable] = ()
    modules: LongTuple[LeafModule] = ()
    state: LongTuple[StateTensor] = ()
    regions: LongTuple[Region] = ()
    returns: Arguments = ()
    output_paths: LongTuple[Path] = ()
    input_structure: str = Field("", max_length=100_000)
    sample: Sample | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_boundaries(self.boundaries, len(self.layers))
        check_edges(self.edges, len(self.layers))
        check_layer_indices(self.parameters, len(self.layers))
        # Here and not in the service, so that no way of reading a graph can leave the checks out.
        if self.rebuildable:
            check_rebuildable(self)
        return self

    def to_networkx(self) -> networkx.MultiDiGraph:
        """Return the layers as nodes of a networkx graph and the tensors between them as edges.

        Nodes are layer indices with the attribute ``layer``; `MODEL_INPUT` stands for the model's
        inputs if a layer reads them. Edges have the attribute ``tensor``.
        """
        # Imported here, since reading documents should not take the time of importing networkx.
        import networkx

        graph = networkx.MultiDiGraph(name=self.model)
        graph.add_nodes_from((index, {"layer": layer}) for index, layer in enumerate(self.layers))
        graph.add_edges_from(
            (edge.source, edge.target, {"tensor": edge.tensor}) for edge in self.edges
        )
        return graph

    def __str__(self) -> str:

        return format_graph(self)


def check_boundaries(boundaries: tuple[Boundary, ...], num_layers: int) -> None:
    """Check that there is one boundary per gap between layers, in order."""
    found = [boundary.after for boundary in boundaries]
    if found != list(range(num_layers - 1)):
        raise ValueError(
            f"{num_layers} layers have {num_layers - 1} boundaries, after layers 0 to "
            f"{num_layers - 2} in order; found {len(found)}"
        )


def check_edges(edges: tuple[Edge, ...], num_layers: int) -> None:
    """Check that every edge runs forwards between existing layers, so that there is no cycle."""
    for position, edge in enumerate(edges):
        # `MODEL_INPUT` is below every layer, so edges from the inputs pass as well.
        if not edge.source < edge.target < num_layers:
            raise ValueError(
                f"edges[{position}] goes from layer {edge.source} to {edge.target}; "
                f"edges run forwards between the {num_layers} layers"
            )


def check_layer_indices(parameters: tuple[Parameter, ...], num_layers: int) -> None:
    """Check that every parameter lists existing layers in ascending order."""
    for parameter in parameters:
        if list(parameter.layers) != sorted(set(parameter.layers)) or any(
            not 0 <= layer < num_layers for layer in parameter.layers
        ):
            raise ValueError(
                f"parameter {parameter.names[0]!r} lists layers {parameter.layers}; they must be "
                f"ascending and between 0 and {num_layers - 1}"
            )


HEADINGS = ("layer", "module", "operations", "parameters", "a cut behind sends", "")

MOST_REASON = 100
"""Most characters shown of the reason why a layer is opaque."""


def format_graph(graph: Graph) -> str:
    """Format a graph as `print(graph)` and ``stagewright show`` show it."""
    operations = Counter(entry.layer for entry in graph.operations)
    cuts: list[Boundary | None] = [*graph.boundaries, None]
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            layer.module_type,
            str(operations[index]) if operations else "",
            format_bytes(layer.parameter_bytes),
            _cut(cut),
            f"OPAQUE: {truncate(layer.opaque, MOST_REASON)}" if layer.opaque else "",
        )
        for index, (layer, cut) in enumerate(zip(graph.layers, cuts, strict=True))
    ]
    if not any(layer.opaque for layer in graph.layers):
        rows = [row[:-1] for row in rows]
    trained = [one for one in graph.parameters if one.kind == "parameter"]
    tied = sum(len(one.names) > 1 for one in trained)
    lines = [
        f"{sanitize(graph.model)}, captured by {graph.mode} in "
        f"{'training' if graph.training else 'evaluation'} mode",
        f"{count(len(graph.layers), 'layer')}, "
        f"{count(sum(entry.legal for entry in graph.boundaries), 'legal cut')}, "
        f"{format_bytes(sum(one.size_bytes for one in trained))} of parameters"
        + (f", {tied} of them tied" if tied else ""),
        f"id {graph.content_id()}",
        *map(sanitize, graph.notes),
        *explain_not_rebuildable(graph),
    ]
    return "\n".join([format_table([HEADINGS[: len(rows[0])], *rows]), "", *lines])


def _cut(cut: Boundary | None) -> str:
    if cut is None:
        return ""
    if not cut.legal:
        return f"no cut: {cut.reason}" if cut.reason else "no cut"
    return f"{format_bytes(cut.forward_bytes)}, {format_bytes(cut.backward_bytes)} back"


def explain_not_rebuildable(graph: Graph) -> list[str]:
    """Return the first reason why a graph cannot be rebuilt, as a line; empty if it can."""
    if graph.rebuildable:
        return []
    reasons = graph.not_rebuildable
    text = "cannot be measured without the model's code"
    if reasons:
        where = f", in {reasons[0].layer}" if reasons[0].layer else ""
        more = f" (and {count(len(reasons) - 1, 'more reason')})" if len(reasons) > 1 else ""
        text += f": {reasons[0].reason}{where}{more}"
    return [sanitize(text)]
