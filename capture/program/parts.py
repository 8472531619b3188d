"""Code of a segment in parts: activation checkpoints inside a stage, and blocks of its weights.

A part is a run of operations in the program's order. Only values that later parts read pass from
one part to another, so that whoever runs a part knows everything it takes and gives.

A part that writes in place to a value of another part does so on a copy, which takes the value's
place for all later parts: what a checkpoint keeps must stay as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

Values = tuple[Any, ...]

PartCode = Callable[..., Values]
"""Takes the segment, then the values that a part reads; returns those that it writes."""

RunCheckpoint = Callable[[int, Callable[[Values], Values], Values], Values]
"""Runs a part that is a checkpoint, given its number, its function and what it takes."""

RunBlock = Callable[["Part", Callable[[Values], Values], Values], Values]
"""Runs any part, given its function and what it takes."""

NO_SPAN = -1
"""Span of operations outside of all checkpoints and blocks."""


@dataclass
class Memory:
    """Storages that values of a graph hold and operations change, as keys.

    Attributes:
        held: Storages of each value.
        changed: Storages that each operation may change in place.
        lasting: Storages of parameters, buffers and constants.
    """

    held: dict[fx.Node, set[int]] = field(default_factory=dict)
    changed: dict[fx.Node, set[int]] = field(default_factory=dict)
    lasting: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Part:
    """Operations that run together.

    Attributes:
        code: What they do.
        reads: Numbers of the values they take.
        writes: Numbers of those they give.
        drops: Numbers of values that nothing behind reads.
        is_checkpoint: Whether the part may keep only what it takes, and run again in the backward.
        targets: Names of the modules it calls and of the tensors it reads.
    """

    code: PartCode
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    drops: tuple[int, ...]
    is_checkpoint: bool
    targets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PartedCode:
    """The parts of a segment, called like the function of a single graph.

    The segment's ``_run_checkpoint`` runs the parts that are checkpoints; without it they run as
    any other. Its ``_run_block`` runs every part. The last one returns the segment's outputs.
    """

    parts: tuple[Part, ...]

    def __call__(self, segment: Any, *inputs: Any) -> Values:
        run_checkpoint: RunCheckpoint | None = segment._run_checkpoint
        run_block: RunBlock | None = segment._run_block
        values: dict[int, Any] = dict(enumerate(inputs))
        given: Values = ()
        for at, part in enumerate(self.parts):
            taken = tuple(values[number] for number in part.reads)

            run: Callable[[Values], Values] = partial(_run_code, part.code, segment)
            if part.is_checkpoint and run_checkpoint is not None:
                run = partial(run_checkpoint, at, run)
            given = run_block(part, run, taken) if run_block is not None else run(taken)
            values.update(zip(part.writes, given, strict=False))
            for number in part.drops:
                values.pop(number, None)
        return given


def _run_code(code: PartCode, segment: Any, taken: Values) -> Values:
    return code(segment, *taken)


@dataclass
class _Run:
    """Operations of a part in order, all of one span."""

    span: int
    nodes: list[fx.Node] = field(default_factory=list)
    changes: list[fx.Node] = field(default_factory=list)
    """Values of other runs that it changes in place."""


def split_into_parts(
    graph: fx.Graph,
    spans: Mapping[fx.Node, int],
    compile_graph: Callable[[fx.Graph], PartCode],
    enter: Callable[[Any], Any] | None = None,
    copy: Callable[[Any], Any] | None = None,
    memory: Memory | None = None,
    checkpoints: int = 0,
) -> PartedCode:
    """Split a graph into parts; every run of operations of one span is a checkpoint or a block.

    Args:
        graph: The whole segment.
        spans: The span of each of its operations, `NO_SPAN` for those outside; attributes, and
            constants that follow from attributes alone, have none.
        compile_graph: Returns the function of a part's graph.
        enter: Applied to whatever a checkpoint takes.
        copy: Applied instead to what a part changes in place.
        memory: What tells that.
        checkpoints: Spans numbered below this are checkpoints, all others blocks. Without
            checkpoints nothing is copied.
    """
    free, runs = _find_runs(graph, dict(spans), memory or Memory())
    slots = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    reads = [list(_list_reads(run, free)) for run in runs]
    last = {node: at for at, nodes in enumerate(reads) for node in nodes}
    parts = []
    for at, run in enumerate(runs):
        writes = [node for node in (*run.nodes, *run.changes) if last.get(node, -1) > at]
        for node in writes:
            slots.setdefault(node, len(slots))
        is_checkpoint = NO_SPAN < run.span < checkpoints
        entered = {
            node: copy if node in run.changes and checkpoints else enter if is_checkpoint else None
            for node in reads[at]
        }
        copied = _copy_run(run, entered, writes, free)
        parts.append(
            Part(
                compile_graph(copied),
                tuple(slots[node] for node in reads[at]),
                tuple(slots[node] for node in writes),
                tuple(slots[node] for node in reads[at] if last[node] == at),
                is_checkpoint,
                frozenset(
                    str(node.target)
                    for node in copied.nodes
                    if node.op in ("get_attr", "call_module")
                ),
            )
        )
    return PartedCode(tuple(parts))


def _find_runs(
    graph: fx.Graph, spans: dict[fx.Node, int], memory: Memory
) -> tuple[set[fx.Node], list[_Run]]:
    """Return the constants and the runs, each with what it changes of others' values.

    Spans with a change that several values would show are no checkpoints.
    """
    while True:
        free = _find_free(graph, spans)
        runs = _list_runs(graph, spans, free)
        mixed = _find_changes(graph, runs, free, memory) - {NO_SPAN}
        if not mixed:
            return free, runs
        spans.update({node: NO_SPAN for node, span in spans.items() if span in mixed})


def _find_changes(
    graph: fx.Graph, runs: Sequence[_Run], free: set[fx.Node], memory: Memory
) -> set[int]:
    """Set the values of others that each run changes; return the spans where copies do not do."""
    made = {node: at for at, run in enumerate(runs) for node in run.nodes}
    made |= dict.fromkeys(graph.find_nodes(op="placeholder"), -1)
    last: dict[fx.Node, int] = {}
    for at, run in enumerate(runs):
        last.update(dict.fromkeys(_list_reads(run, free), at))
    mixed: set[int] = set()
    for at, run in enumerate(runs):
        keys = set[int]().union(*(memory.changed.get(node, ()) for node in run.nodes))
        reads = set(_list_reads(run, free))
        for key in keys:
            sharing = [
                node
                for node, where in made.items()
                if where < at <= last.get(node, -1) and key in memory.held.get(node, ())
            ]
            if len(sharing) == 1 and sharing[0] in reads and key not in memory.lasting:
                run.changes.append(sharing[0])
            elif sharing:
                mixed.add(run.span)
                mixed.update(runs[made[node]].span for node in sharing if made[node] >= 0)
    return mixed


def _find_free(graph: fx.Graph, spans: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the attributes and the constants that follow from them alone."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        is_call = node.op not in ("placeholder", "output") and node not in spans
        if is_call and all(source in free for source in node.all_input_nodes):
            free.add(node)
    return free


def _list_runs(graph: fx.Graph, spans: Mapping[fx.Node, int], free: set[fx.Node]) -> list[_Run]:
    """Return the runs in order, the last of which ends in the output.

    Constants that several runs read are moved out of ``free`` to the first run; others stay, to be
    repeated where they are read.
    """
    first, runs = _Run(NO_SPAN), [_Run(NO_SPAN)]
    for node in graph.nodes:
        if node.op == "placeholder" or node in free:
            continue
        span = spans.get(node, NO_SPAN)
        if span != runs[-1].span:
            runs.append(_Run(span))
        runs[-1].nodes.append(node)
    users: dict[fx.Node, set[int]] = {}
    for at, run in enumerate(runs):
        for node in _list_free_sources(run, free):
            users.setdefault(node, set()).add(at)
    first.nodes = [
        node for node in graph.nodes if node.op != "get_attr" and len(users.get(node, ())) > 1
    ]
    free.difference_update(first.nodes)
    return [run for run in (first, *runs) if run.nodes]


def _list_free_sources(run: _Run, free: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the attributes and constants that a run reads, and those that they follow from."""
    seen: set[fx.Node] = set()
    pending = list(run.nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in free and source not in seen:
                seen.add(source)
                pending.append(source)
                yield source


def _list_reads(run: _Run, free: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the values that a run takes from elsewhere, each once."""
    seen = set(run.nodes)
    for node in (*run.nodes, *_list_free_sources(run, free)):
        for source in node.all_input_nodes:
            if source not in seen and source not in free:
                seen.add(source)
                yield source


def _copy_run(
    run: _Run,
    entered: Mapping[fx.Node, Callable[[Any], Any] | None],
    writes: Sequence[fx.Node],
    free: set[fx.Node],
) -> fx.Graph:
    """Return a graph of one run's operations, with what is applied to each value it takes."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"value_{at}") for at, node in enumerate(entered)}
    for node, enter in entered.items():
        if enter is not None:
            copies[node] = graph.call_function(enter, (copies[node],))
    own = set(_list_free_sources(run, free)) | set(run.nodes)
    for node in run.nodes[0].graph.nodes:
        if node in own:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    if run.nodes[-1].op != "output":
        graph.output(tuple(copies[node] for node in writes))
    graph.lint()
    return graph
