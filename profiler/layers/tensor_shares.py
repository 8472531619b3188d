"""Shares of a captured model's layers that each of several devices has by tensor parallelism.

The runtime splits a model by the same search (`capture.splitting`), so what is said here is what it
does. Of a layer's operations those that are split count by their part; times are not measured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from torch import Tensor, fx, nn

from ...capture.captured import Captured
from ...capture.program.cuts import differentiable_nodes
from ...capture.program.mutation import mutated_inputs
from ...capture.program.program import Program, storages_of, tensors_of, value_of
from ...capture.splitting.find_split import ModelSplit, find_split, is_local, list_outputs
from ...capture.splitting.layout import NodeSplit, base_name, find_weight
from ...core.profile.profile import LayerProfile, SplitLayer, TensorSplit

DEGREES = (2, 4, 8)

FLOPS_PER_BYTE = 150
"""FLOPs of products that take as long as moving a byte: 130 to 300 on A100 to B200."""

LOSS_BYTES = 4
"""Of a number that ranks reduce for a loss, which they compute in float32."""

MAX_REASONS = 3


@dataclass(frozen=True)
class LayerShare:
    """Split part of one layer, and exchanges of its devices, for one micro-batch.

    Attributes:
        work: Share of its work that is split.
        saved: Share of what it makes that is split.
        divided_bytes: Its parameters of which a device holds a part.
        reduced: Bytes of each all-reduce of a forward.
        entered: Bytes of each all-reduce of a backward.
        gathered: Bytes of each whole tensor that is gathered, or scattered after a reduction, in a
            forward.
        returned: Bytes of each such tensor in a backward.
        reasons: Why something is not split.
    """

    work: float = 0.0
    saved: float = 0.0
    divided_bytes: int = 0
    reduced: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()

    def of(self, entry: LayerProfile, degree: int) -> SplitLayer:
        """Return what one of ``degree`` devices does of a layer."""
        saved = entry.saved_activation_bytes
        part, used = int(saved * self.saved), int(entry.workspace_bytes * self.work)
        held = entry.layer.parameter_bytes - self.divided_bytes
        return SplitLayer(
            compute_share=1 - self.work * (1 - 1 / degree),
            parameter_bytes=held + ceil(self.divided_bytes / degree),
            saved_activation_bytes=saved - part + ceil(part / degree),
            workspace_bytes=entry.workspace_bytes - used + ceil(used / degree),
            forward_reduced_bytes=sum(self.reduced),
            forward_reductions=len(self.reduced),
            backward_reduced_bytes=sum(self.entered),
            backward_reductions=len(self.entered),
            forward_gathered_bytes=sum(self.gathered),
            backward_gathered_bytes=sum(self.returned),
            gathers=len(self.gathered) + len(self.returned),
            reasons=self.reasons,
        )


@dataclass(frozen=True)
class ModelShares:
    """The layers' shares, and the tensors between them of which each device holds a part."""

    layers: tuple[LayerShare, ...]
    divided: tuple[str, ...] = ()
    loss: tuple[int, ...] = ()
    """Bytes of each all-reduce by which a cross-entropy reads outputs in parts."""


TensorShares = dict[int, ModelShares]
"""Shares by number of devices."""


def find_shares(captured: Captured) -> TensorShares:
    """Return how the layers split over 2, 4 and 8 devices; none where nothing does."""
    whole, captured = captured, captured.inside or captured
    both = [captured, *([captured.evaluation] if captured.evaluation is not None else [])]
    traced = [(each.program, each.layers, each.cuts) for each in both]
    found = {}
    for degree in DEGREES:
        split = find_split(traced, [degree] * len(captured.layers))
        if split.weights:
            found[degree] = ModelShares(
                _find_shares(captured, split),
                _divided(whole, captured, split),
                tuple(_reduced_by_loss(captured, split)),
            )
    return found


def _reduced_by_loss(captured: Captured, split: ModelSplit) -> Iterator[int]:
    """Yield the bytes reduced of each output: the largest of a position's values, then three sums.

    Where a loss is none that reads parts, whole outputs are gathered instead.
    """
    program = captured.program
    for node, layout in zip(program.flat_outputs, list_outputs(program, split), strict=True):
        if layout is not None:
            value = value_of(node)
            positions = value.numel() // value.shape[layout.dim]
            yield from (positions * LOSS_BYTES, 3 * positions * LOSS_BYTES)


def list_splits(shares: TensorShares, layers: Sequence[LayerProfile]) -> tuple[TensorSplit, ...]:
    """Return the splits of a profile's layers."""
    found = []
    for degree, own in shares.items():
        last = replace(own.layers[-1], reduced=(*own.layers[-1].reduced, *own.loss))
        pairs = zip((*own.layers[:-1], last), layers, strict=True)
        split = tuple(share.of(entry, degree) for share, entry in pairs)
        found.append(TensorSplit(degree=degree, layers=split, divided=own.divided))
    return tuple(found)


@dataclass
class _Totals:
    """Sums over the operations of a layer."""

    work: float = 0.0
    split_work: float = 0.0
    made: int = 0
    split_made: int = 0
    reduced: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)


def _find_shares(captured: Captured, split: ModelSplit) -> tuple[LayerShare, ...]:
    totals = _add_up(captured, split)
    divided = [0] * len(totals)
    names = {name for name, weight in _named(captured.program) if id(weight) in split.weights}
    for record in captured.graph.parameters:
        if record.kind == "parameter" and not names.isdisjoint(record.names):
            for layer in record.layers:
                divided[layer] += record.size_bytes
    reasons: list[dict[str, None]] = [{} for _ in totals]
    for (layer, _), reason in split.reasons.items():
        reasons[layer][reason] = None
    return tuple(
        LayerShare(
            work=each.split_work / each.work if each.work else 0.0,
            saved=each.split_made / each.made if each.made else 0.0,
            divided_bytes=size,
            reduced=tuple(each.reduced),
            entered=tuple(each.entered),
            gathered=tuple(each.gathered),
            returned=tuple(each.returned),
            reasons=tuple(why)[:MAX_REASONS],
        )
        for each, size, why in zip(totals, divided, reasons, strict=True)
    )


def _divided(whole: Captured, captured: Captured, split: ModelSplit) -> tuple[str, ...]:
    names = {
        spec.name: None
        for cut, own in zip(captured.cuts, whole.cuts, strict=True)
        if cut.boundary.legal and own.boundary.legal
        for node, spec in zip(cut.nodes, own.boundary.tensors, strict=True)
        if is_local(node, split)
    }
    return tuple(names)


def _named(program: Program) -> list[tuple[str, nn.Parameter]]:
    return list(program.model.named_parameters(remove_duplicate=False))


def _add_up(captured: Captured, split: ModelSplit) -> list[_Totals]:
    found = [_Totals() for _ in range(len(captured.layers))]
    exchanges = _Exchanges(captured, split)
    for node, index in captured.layers.layer_of.items():
        totals, change = found[index], split.changes.get(node)
        work, size = _work_of(node, captured.program), _bytes_of(node)
        totals.work += work
        totals.made += size
        if change is None:
            continue
        exchanges.add(node, change, totals)
        if not change.alike:
            totals.split_work += work
            is_split = change.layout is not None and node not in exchanges.gathered
            totals.split_made += size if is_split else 0
    return found


class _Exchanges:
    """Counts what ranks exchange for operations, each value once, as programs are rewritten."""

    def __init__(self, captured: Captured, split: ModelSplit) -> None:
        self._captured, self._split = captured, split
        self._flowing = differentiable_nodes(captured.program)
        self._seen: set[tuple[fx.Node, object]] = set()
        self.gathered = {source for change in split.changes.values() for source in change.whole}

    def add(self, node: fx.Node, change: NodeSplit, totals: _Totals) -> None:
        size = _bytes_of(node)
        if change.sums and change.layout is None:
            totals.reduced.append(size)
        elif change.sums:
            totals.gathered.append(size)
            totals.returned += [size] if node in self._flowing else []
        if node in self._split.gathered:
            totals.gathered.append(size)
        for source in node.all_input_nodes:
            if source in change.whole:
                self._add_gather(source, change, totals)
            elif self._is_whole(source) and source in self._flowing and not change.alike:
                self._add_entry(source, change, totals)
        totals.entered += self._weights_read_whole(node, change)

    def _add_gather(self, source: fx.Node, change: NodeSplit, totals: _Totals) -> None:
        is_entered = not change.alike and source in self._flowing
        if (source, is_entered) in self._seen or (source in self._split.gathered and change.alike):
            return
        self._seen.add((source, is_entered))
        totals.gathered.append(_bytes_of(source))
        if is_entered:
            totals.returned.append(_bytes_of(source))

    def _add_entry(self, source: fx.Node, change: NodeSplit, totals: _Totals) -> None:
        """Count how the gradient of a whole value that is read to compute parts becomes whole."""
        if source is change.bias and change.layout is None:
            return
        layout = change.slices.get(source)
        if (source, layout) in self._seen:
            return
        self._seen.add((source, layout))
        (totals.entered if layout is None else totals.returned).append(_bytes_of(source))

    def _is_whole(self, source: fx.Node) -> bool:
        change = self._split.changes.get(source)
        if change is not None and change.layout is not None:
            return False
        if (weight := find_weight(source, self._captured.program)) is not None:
            return id(weight) not in self._split.weights
        return isinstance(value_of(source), Tensor)

    def _weights_read_whole(self, node: fx.Node, change: NodeSplit) -> list[int]:
        """Return the bytes of weights of a module that ranks read whole to compute rows."""
        if node.op != "call_module" or change.call is None or change.layout is None:
            return []
        names = [] if change.sums else ["weight", "bias"]
        module = self._captured.program.attribute(str(node.target))
        if isinstance(change.bias, str):
            names.append(change.bias)
        weights = [getattr(module, name, None) for name in names]
        return [
            weight.nbytes
            for weight in weights
            if isinstance(weight, nn.Parameter)
            if weight.requires_grad and id(weight) not in self._split.weights
        ]


def _bytes_of(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value_of(node)))


def _work_of(node: fx.Node, program: Program) -> float:
    """Return an operation's bytes, with its products' FLOPs as bytes; a view has no work."""
    own, sources = storages_of([node]), storages_of(node.all_input_nodes)
    if not own.isdisjoint(sources) and not mutated_inputs(node, program):
        return 0.0
    read = sum(_bytes_of(source) for source in node.all_input_nodes)
    return read + _bytes_of(node) + _flops_of(node, program) / FLOPS_PER_BYTE


def _flops_of(node: fx.Node, program: Program) -> int:
    made = value_of(node)
    if not isinstance(made, Tensor):
        return 0
    shapes: list[tuple[int, ...]] = [
        tuple(each.shape)
        for each in map(value_of, node.all_input_nodes)
        if isinstance(each, Tensor)
    ]
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return 0
        return 2 * made.numel() * prod(module.weight.shape[1:])
    name = base_name(node)
    if name in ("linear", "mm", "bmm", "matmul", "grouped_mm_fallback", "_grouped_mm"):
        return 2 * made.numel() * shapes[0][-1]
    if name in ("addmm", "baddbmm"):
        return 2 * made.numel() * shapes[1][-1]
    if name == "scaled_dot_product_attention":
        return 4 * made.numel() * shapes[1][-2]
    if name.startswith(("conv", "_convolution")):
        return 2 * made.numel() * prod(shapes[1][1:])
    return 0
