"""Work of a deep model from a shallow one: the same model with fewer of its repeated blocks.

Blocks of a published model repeat, each alike or in turns (sliding-window and global attention),
some behind a few of another kind (dense layers before experts). The time of a capture grows with
their number, and says of the tenth what it said of the third. So three periods are kept::

    ... | head: what differs, and the first period | second | third | rest, a period at most | ...

The second is repeated in between. Blocks are compared before, attribute by attribute; and after
the capture the third period must be the second one, moved: its operations, their names and
constants, costs, edges and saved storages. Otherwise the whole model is captured.

A rule in the model's own forward about the number of a block that is left out would not be seen. So
this is for models of named families alone; the tests compare both ways byte by byte for every type.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, fx, nn

from ...capture.captured import Captured
from ...capture.serialize.portable_graph import iterate_state
from ...core.errors import CaptureError, MeasurementError
from ...core.graph.graph import MODEL_INPUT, Boundary, Edge, Graph, Layer, Parameter
from ...core.graph.tensors import TensorSpec
from ...core.profile.profile import SavedStorage
from ..layers.loss_layer import LossFunction
from ..layers.tensor_shares import ModelShares
from .layer_costs import EstimateTarget, ModelWork, capture_on_meta, captured_work

_LOG = logging.getLogger(__name__)


class NotRepeated(Exception):
    """The captured blocks are not copies of each other; the message says in what."""


@dataclass(frozen=True)
class BlockPattern:
    """Pattern in which the blocks of a model repeat.

    Attributes:
        path: Of the list that holds the blocks.
        head: Blocks before the second period.
        period: Blocks after which they are the same again.
        kept: Blocks of the shallow model.
        total: Blocks of the model.
    """

    path: str
    head: int
    period: int
    kept: int
    total: int

    @property
    def inserted(self) -> int:
        """Return how many periods the shallow model lacks."""
        return (self.total - self.kept) // self.period

    def counterpart(self, block: int) -> int:
        """Return the block of the shallow model that stands for a block of the whole one."""
        if block < self.head + self.period:
            return block
        if block >= self.total - (self.kept - self.head - self.period):
            return block - self.inserted * self.period
        return self.head + (block - self.head) % self.period


def find_pattern(model: nn.Module) -> BlockPattern | None:
    """Find the blocks that can be left out; `None` if there are none, or several lists of them."""
    found = []
    lists = [path for path, module in model.named_modules() if type(module) is nn.ModuleList]
    for path in lists:
        if not any(path.startswith(f"{other}.") for other in lists):
            pattern = _find_period(path, list(model.get_submodule(path).children()))
            found += [pattern] if pattern else []
    return found[0] if len(found) == 1 else None


def _find_period(path: str, blocks: Sequence[nn.Module]) -> BlockPattern | None:
    kinds: list[int] = []
    for index, block in enumerate(blocks):
        alike = (k for k in dict.fromkeys(kinds) if _is_alike(blocks[k], block, (k, index)))
        kinds.append(next(alike, index))
    patterns = []
    for period in range(1, len(blocks) // 3):
        start = len(blocks) - period
        while start and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        # Behind the third period another block has to follow, as behind the second.
        kept = start + 3 * period + ((len(blocks) - start - 1) % period + 1)
        if kept < len(blocks):
            patterns.append(BlockPattern(path, start + period, period, kept, len(blocks)))
    return min(patterns, key=lambda pattern: pattern.kept, default=None)


def _is_alike(first: nn.Module, other: nn.Module, numbers: tuple[int, int]) -> bool:
    """Return whether two blocks differ in nothing but their weights' values and own numbers."""
    modules, others = list(first.named_modules()), list(other.named_modules())
    return len(modules) == len(others) and all(
        name == again
        and type(module) is type(twin)
        and module.extra_repr() == twin.extra_repr()
        and _is_same(vars(module), vars(twin), numbers)
        for (name, module), (again, twin) in zip(modules, others, strict=True)
    )


def _is_same(value: Any, twin: Any, numbers: tuple[int, int]) -> bool:
    if value is twin or (isinstance(value, nn.Module) and isinstance(twin, nn.Module)):
        return True  # modules inside are compared in their turn
    if type(value) is not type(twin):
        return False
    if isinstance(value, dict):
        return list(value) == list(twin) and _is_same(
            list(value.values()), list(twin.values()), numbers
        )
    if isinstance(value, tuple | list):
        return len(value) == len(twin) and all(
            _is_same(*pair, numbers) for pair in zip(value, twin, strict=True)
        )
    if isinstance(value, partial):
        first, other = ((made.func, made.args, made.keywords) for made in (value, twin))
        return _is_same(first, other, numbers)
    if isinstance(value, Tensor):
        forms = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in (value, twin)]
        return forms[0] == forms[1]
    return bool(value == twin) or (value, twin) == numbers


def repeated_work(
    model: nn.Module,
    sample: Any,
    wanted: EstimateTarget,
    loss_fn: LossFunction | None = None,
    target: Tensor | None = None,
) -> ModelWork | None:
    """Find what a model's layers do by capturing few of its blocks; `None` if they do not repeat.

    Arguments are those of `layer_costs.model_work`, whose result is the same.
    """
    pattern = find_pattern(model)
    if pattern is None:
        return None
    try:
        with without_repetitions(model, pattern):
            captured, flat, loss = capture_on_meta(model, sample, loss_fn, target)
            work = captured_work(captured, flat, wanted, loss)
        return repeat_blocks(work, captured, pattern, model)
    except (NotRepeated, CaptureError, MeasurementError) as reason:
        _LOG.info("%s is captured as a whole: %s", type(model).__name__, reason)
        return None


@contextmanager
def without_repetitions(model: nn.Module, pattern: BlockPattern) -> Iterator[None]:
    """Leave out the model's repeated blocks inside."""
    owner, _, name = pattern.path.rpartition(".")
    whole = model.get_submodule(pattern.path)
    assert isinstance(whole, nn.ModuleList), "a pattern is of one"
    holder = model.get_submodule(owner)
    setattr(holder, name, whole[: pattern.kept])
    try:
        yield
    finally:
        setattr(holder, name, whole)


def repeat_blocks(
    work: ModelWork, captured: Captured, pattern: BlockPattern, model: nn.Module
) -> ModelWork:
    """Return the work of the whole model, from that of the shallow one.

    Args:
        work: Of the shallow model.
        captured: The shallow model, as captured.
        pattern: Its blocks.
        model: The whole one, whose weights are listed.

    Raises:
        NotRepeated: The blocks turn out to differ.
    """
    return _Repetition(work, captured, pattern).of(model)


_OPERATION = re.compile(r"operation '(\w+)'")
_LAST_NUMBER = re.compile(r"(.+?)_(\d+)")


class _Repetition:
    """Layers ``start`` to ``end`` are the second period, and as many behind them the third.

    ``shift`` is how far the third and all behind it move.
    """

    def __init__(self, work: ModelWork, captured: Captured, pattern: BlockPattern) -> None:
        self._work, self._pattern, self._graph = work, pattern, work.graph
        self._name = re.compile(rf"({re.escape(pattern.path)}\.)(\d+)(?=[.@]|$)")
        # Leaf modules name their operations, with underscores for points.
        path = pattern.path.replace(".", "_")
        self._called = re.compile(rf"({re.escape(path)}_)(\d+)(?=_|$)")
        blocks = [self._block_of(layer.name) for layer in self._graph.layers]
        inside = [block for block in blocks if block is not None]
        _agree("blocks", sorted(set(inside)), list(range(pattern.kept)))
        first = blocks.index(0)
        _agree("order of layers", blocks[first : first + len(inside)], sorted(inside))
        self._start = blocks.index(pattern.head)
        self._end = blocks.index(pattern.head + pattern.period)
        self._width = self._end - self._start
        self._shift = self._width * pattern.inserted
        self._check_captured(captured, blocks)
        program, layers = captured.program, captured.layers
        self._made_in = {node.name: layer for node, layer in layers.layer_of.items()}
        self._made_in |= {node.name: MODEL_INPUT for node in program.inputs}
        nodes: list[list[fx.Node]] = [[] for _ in blocks]
        for node in program.graph.nodes:
            if node in layers.layer_of:
                nodes[layers.layer_of[node]].append(node)
        self._steps = self._find_steps(nodes)

    def _block_of(self, name: str) -> int | None:
        found = self._name.match(name)
        return int(found[2]) if found else None

    def _check_captured(self, captured: Captured, blocks: list[int | None]) -> None:
        """Refuse what a block says of itself alone, and texts that would have to be moved."""
        graph, program, path = self._graph, captured.program, self._pattern.path
        _agree("opaque modules", (program.opaque, dict(program.stateful)), ({}, {}))
        texts = [*graph.notes, *graph.fixed_mode, graph.chain_break or ""]
        named = [int(number) for text in texts for number in re.findall(rf"{path}\.(\d+)", text)]
        _agree("notes on blocks", [block for block in named if block >= self._pattern.head], [])
        reasons = [boundary.reason for boundary in graph.boundaries[blocks.index(0) :]]
        _agree("illegal cuts", [reason for reason in reasons if reason], [])
        # A module beside the blocks is divided if it holds a quarter of all operations; with more
        # blocks it would hold less.
        holders = {layer.name.partition("@")[0].rpartition(".")[0] for layer in graph.layers}
        beside = {name for name in holders if not f"{path}.".startswith(f"{name}." if name else "")}
        _agree("divided modules", [name for name in beside if self._block_of(name) is None], [])

    def _find_steps(self, nodes: list[list[fx.Node]]) -> dict[str, int]:
        """Return by how much the number behind an operation's name grows in a period."""
        steps: dict[str, int] = {}
        pairs = [
            pair
            for layer in range(self._start, self._end)
            for pair in _zip("operations", nodes[layer], nodes[layer + self._width])
        ]
        for node, moved in pairs:
            if not self._called.match(node.name):
                (name, number), (again, later) = _number(node.name), _number(moved.name)
                _agree("names", name, again)
                _agree("numbers", steps.setdefault(name, later - number), later - number)
        self._steps = steps
        for node, moved in pairs:
            _agree("operations", self._rename(node.name, 1), moved.name)
            if node.op != "call_module":
                _agree("operations", (node.op, node.target), (moved.op, moved.target))
        return steps

    def _rename(self, name: str, times: int) -> str:
        """Return the name of an operation moved by so many periods."""
        if self._made_in[name] < self._start:
            return name
        found = self._called.match(name)
        if found:
            number = int(found[2]) + times * self._pattern.period
            return f"{found[1]}{number}{name[found.end() :]}"
        base, number = _number(name)
        if base in self._steps:
            return f"{base}_{number + times * self._steps[base]}"
        # The first of its name has no number, or 1 if the bare name is taken by Python.
        _agree(f"first {base!r}", number <= hasattr(builtins, base), True)
        return name

    def of(self, model: nn.Module) -> ModelWork:
        """Return the work of the whole model."""
        work, start, end, width = self._work, self._start, self._end, self._width
        second, third = slice(start, end), slice(end, end + width)
        _agree("costs", work.classes[second], work.classes[third])
        _agree("costs", work.layers[second], work.layers[third])
        order = [*range(end), *(list(range(start, end)) * self._pattern.inserted)]
        order += range(end, len(work.classes))
        graph = self._graph
        return replace(
            work,
            classes=tuple(work.classes[index] for index in order),
            layers=tuple(work.layers[index] for index in order),
            storages=tuple(self._storages(work.storages)),
            shares={degree: self._shares(own, order) for degree, own in work.shares.items()},
            graph=Graph(
                model=graph.model,
                mode=graph.mode,
                training=graph.training,
                inputs=graph.inputs,
                outputs=tuple(self._tensor(one, self._pattern.inserted) for one in graph.outputs),
                layers=tuple(self._layers()),
                edges=tuple(self._edges()),
                boundaries=tuple(self._boundaries()),
                parameters=tuple(self._parameters(model)),
                fixed_mode=graph.fixed_mode,
                chain_break=self._chain_break(),
                notes=graph.notes,
            ),
        )

    def _shares(self, shares: ModelShares, order: Sequence[int]) -> ModelShares:
        start, end, layers = self._start, self._end, shares.layers
        _agree("shares", layers[start:end], layers[end : end + self._width])
        return replace(
            shares,
            layers=tuple(layers[index] for index in order),
            divided=tuple(self._names(shares.divided)),
        )

    def _names(self, names: Iterable[str]) -> list[str]:
        """Return names of tensors by layer, those of the second period for each time it occurs."""
        found = []
        for name in names:
            layer = self._made_in[name]
            if self._start <= layer < self._end:
                found += [(layer + moved, self._rename(name, t)) for t, moved in self._times()]
            else:
                moved = self._shift if layer >= self._end else 0
                found.append((layer + moved, self._rename(name, self._pattern.inserted)))
        return [name for _, name in sorted(found, key=lambda entry: entry[0])]

    def _chain_break(self) -> str | None:
        found = _OPERATION.match(self._graph.chain_break or "")
        if not found:
            return self._graph.chain_break
        name = self._rename(found[1], self._pattern.inserted)
        return f"operation {name!r}{found.string[found.end() :]}"

    def _times(self) -> Iterator[tuple[int, int]]:
        """Yield how often the second period occurs: periods and layers each copy is moved by."""
        for times in range(self._pattern.inserted + 1):
            yield times, times * self._width

    def _layers(self) -> Iterator[Layer]:
        layers, start, end = self._graph.layers, self._start, self._end
        for one, moved in zip(layers[start:end], layers[end : end + self._width], strict=True):
            _agree("layers", self._layer(one, 1), moved)
        yield from layers[:start]
        for times, _ in self._times():
            yield from (self._layer(one, times) for one in layers[start:end])
        yield from (self._layer(one, self._pattern.inserted) for one in layers[end:])

    def _layer(self, layer: Layer, times: int) -> Layer:
        # Names are sorted as text: 10 stands before 9.
        names = tuple(sorted(self._path(name, times) for name in layer.module_fqns))
        return layer.model_copy(
            update={"name": self._path(layer.name, times), "module_fqns": names}
        )

    def _path(self, name: str, times: int) -> str:
        block = self._block_of(name)
        if block is None or block < self._pattern.head:
            return name
        return self._name.sub(rf"\g<1>{block + times * self._pattern.period}", name, count=1)

    def _tensor(self, tensor: TensorSpec, times: int) -> TensorSpec:
        name = self._rename(tensor.name, times)
        return tensor if name == tensor.name else tensor.model_copy(update={"name": name})

    def _boundaries(self) -> Iterator[Boundary]:
        cuts, start, end = self._graph.boundaries, self._start, self._end
        for cut, moved in zip(cuts[start:end], cuts[end : end + self._width], strict=True):
            made = self._boundary(cut, 1).tensors
            # What no later block reads is gone behind the third period.
            _agree("boundaries", [one for one in moved.tensors if one not in made], [])
        yield from cuts[:start]
        for times, _ in self._times():
            yield from (self._boundary(cut, times) for cut in cuts[start:end])
        yield from (self._boundary(cut, self._pattern.inserted) for cut in cuts[end:])

    def _boundary(self, cut: Boundary, times: int) -> Boundary:
        tensors = tuple(self._tensor(tensor, times) for tensor in cut.tensors)
        after = cut.after + times * self._width
        return cut.model_copy(update={"after": after, "tensors": tensors})

    def _edges(self) -> Iterator[Edge]:
        first, second, rest = self._split(self._graph.edges, lambda edge: edge.source)
        for _, given in groupby(first, key=lambda edge: (edge.source, edge.tensor)):
            edges = list(given)
            for target in self._spread(edge.target for edge in edges):
                yield edges[0].model_copy(update={"target": target})
        third = [edge for edge in rest if edge.source < self._end + self._width]
        _agree("edges", [self._edge(edge, 1) for edge in second], third)
        for times, _ in self._times():
            yield from (self._edge(edge, times) for edge in second)
        yield from (self._edge(edge, self._pattern.inserted) for edge in rest)

    def _edge(self, edge: Edge, times: int) -> Edge:
        layers = times * self._width
        return Edge(
            source=edge.source + layers,
            target=edge.target + layers,
            tensor=self._tensor(edge.tensor, times),
        )

    def _storages(self, storages: Sequence[SavedStorage]) -> Iterator[SavedStorage]:
        first, second, rest = self._split(storages, lambda one: one.layers[0])
        for one in first:
            layers = tuple(self._spread(one.layers))
            yield SavedStorage(size_bytes=one.size_bytes, layers=layers)
        third = [one for one in rest if one.layers[0] < self._end + self._width]
        _agree("saved storages", [_move(one, self._width) for one in second], third)
        for _, layers_moved in self._times():
            yield from (_move(one, layers_moved) for one in second)
        yield from (_move(one, self._shift) for one in rest)

    def _split(self, items: Sequence[Any], layer_of: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Divide what is in the order of its layers: before, in and behind the second period."""
        parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for item in items:
            parts[(layer_of(item) >= self._start) + (layer_of(item) >= self._end)].append(item)
        _agree("order of layers", [item for part in parts for item in part], list(items))
        return parts

    def _spread(self, layers: Iterable[int]) -> list[int]:
        """Return the layers of the whole model that read what one before the second period made."""
        here = set(layers)
        again = {layer for layer in here if self._start <= layer < self._end}
        third = {layer - self._width for layer in here if 0 <= layer - self._end < self._width}
        _agree("readers", sorted(third - again), [])
        spread = {layer for layer in here if layer < self._end}
        spread |= {layer + moved for layer in again & third for _, moved in self._times()}
        spread |= {layer + self._shift for layer in here if layer >= self._end}
        return sorted(spread)

    def _parameters(self, model: nn.Module) -> Iterator[Parameter]:
        held = {one.names: one for one in self._graph.parameters}
        used = set()
        for names, tensor, kind in iterate_state(model):
            block = self._block_of(names[0])
            if block is None:
                found = held.get(names)
                layers = self._spread(found.layers) if found else []
            else:
                before = self._pattern.counterpart(block)
                path = rf"\g<1>{before}"
                found = held.get(tuple(self._name.sub(path, name, count=1) for name in names))
                moved = (block - before) // self._pattern.period * self._width
                layers = [layer + moved for layer in found.layers] if found else []
            if found is None or (found.numel, found.kind) != (tensor.numel(), kind):
                raise NotRepeated(f"{names[0]} has no counterpart")
            used.add(found.names)
            yield found.model_copy(update={"names": names, "layers": tuple(layers)})
        _agree("parameters", held.keys() - used, set())


def _move(storage: SavedStorage, layers: int) -> SavedStorage:
    moved = tuple(layer + layers for layer in storage.layers)
    return storage.model_copy(update={"layers": moved})


def _number(name: str) -> tuple[str, int]:
    """Divide an operation's name from its number; the first of a name has none."""
    found = _LAST_NUMBER.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def _agree(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise NotRepeated(f"{what}: {str(found)[:200]} is not {str(expected)[:200]}")


def _zip(what: str, first: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    _agree(what, len(first), len(other))
    return zip(first, other, strict=True)
