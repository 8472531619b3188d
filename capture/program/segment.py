"""Segments: consecutive layers as a module that holds the model's parameters under their names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Self
from weakref import ref

from torch import Tensor, fx, nn

from ...core.errors import PlanMismatch
from .keyed_randomness import KeyedNodeCopier, RandomKeys
from .layers import Layers
from .mutation import changed_storages, mutated_inputs
from .parts import NO_SPAN, Memory, Part, PartedCode, RunBlock, RunCheckpoint, split_into_parts
from .program import WHOLE, Program, find_module, path_of, references_of, storage_key, storages_of

Code = Callable[..., tuple[Any, ...]]


class Segment(nn.Module):
    """Module that runs its layers: flat tensors in, a tuple of tensors out.

    Its parameters and buffers are the model's own objects, under the model's own names.
    """

    def __init__(self, fixed_mode: tuple[str, ...], training: bool) -> None:
        super().__init__()
        self._fixed_mode = fixed_mode
        self._captured_training = training
        self._constants: dict[str, Tensor] = {}
        self._references: frozenset[str] = frozenset()
        self._code: Code | None = None
        self._get_keyed_code: Callable[[], Code] | None = None
        self._keys: RandomKeys | None = None
        self._run_checkpoint: RunCheckpoint | None = None
        self._run_block: RunBlock | None = None
        # Tuples hide modules from nn.Module, which would register them as children and so add
        # names to the state_dict.
        self._kept_in_evaluation: tuple[nn.Module, ...] = ()
        self._whole: tuple[nn.Module, ...] = ()
        self._evaluation: tuple[Segment, ...] = ()
        # Weak, so that a copy of this segment does not copy the modules it follows.
        self._followed: tuple[tuple[nn.Module, ref[nn.Module]], ...] = ()
        self.training = training

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        assert self._code is not None
        for follower, followed in self._followed:
            if (original := followed()) is not None:
                follower.training = original.training
        if self._evaluation and not self.training:
            (evaluation,) = self._evaluation
            adopt_buffers(evaluation, self)
            return evaluation(*inputs)  # type: ignore[no-any-return]
        if self._keys is not None:
            assert self._get_keyed_code is not None
            return self._get_keyed_code()(self, self._keys, *inputs)
        return self._code(self, *inputs)

    @contextmanager
    def keyed(self, keys: RandomKeys) -> Iterator[None]:
        """Draw every layer's random numbers by these keys; generators are not restored."""
        before, self._keys = self._keys, keys
        try:
            with ExitStack() as evaluation:
                for segment in self._evaluation:
                    evaluation.enter_context(segment.keyed(keys))
                yield
        finally:
            self._keys = before

    def train(self, mode: bool = True) -> Self:
        """Switch training or evaluation mode.

        Modules that were in evaluation mode at capture, such as frozen batch norms, stay in it.

        Raises:
            PlanMismatch: Capture has frozen operations of this segment in the other mode.
        """
        self.check_mode(mode)
        super().train(mode)
        for model in (*self._whole, *(m for e in self._evaluation for m in e.children())):
            model.train(mode)
        for module in self._kept_in_evaluation:
            module.training = False
        for follower, followed in self._followed:
            if (original := followed()) is not None:
                original.training = follower.training
        return self

    def follow_modes(self, model: nn.Module) -> None:
        """Give modules that capture added the mode of those they came from, from now on too."""
        originals = set(model.modules())
        followed = []
        for module in self.modules():
            if module in originals:
                continue
            path = getattr(module, "stagewright_follows", None)
            original = model.get_submodule(path or "")
            module.training = original.training
            if path is not None:
                followed.append((module, ref(original)))
        self._followed = tuple(followed)

    def set_evaluation(self, evaluation: Segment) -> None:
        """Use another segment in evaluation mode; it must share this one's tensors."""
        self._evaluation = (evaluation,)

    def check_mode(self, mode: bool) -> None:
        """Raise `PlanMismatch` for a mode that the traced model cannot reproduce."""
        if mode != self._captured_training and self._fixed_mode:
            wanted = "training" if mode else "evaluation"
            raise PlanMismatch(
                f"cannot switch to {wanted} mode because capture froze "
                f"{', '.join(self._fixed_mode)}; evaluate the unsplit model, which shares these "
                "weights, or write that part with torch.nn modules"
            )

    def rebind_tensors(self, root: nn.Module) -> None:
        """Take over the tensors of ``root`` by name, after it replaced them."""
        theirs = dict(root.named_modules(remove_duplicate=False))
        for path, module in self.named_modules(remove_duplicate=False):
            source = theirs.get(path)
            if source is None or source is module:
                continue
            for ours, held in (
                (module._parameters, source._parameters), (module._buffers, source._buffers),
            ):  # fmt: skip
                ours.update((name, held[name]) for name in ours.keys() & held.keys())
        for evaluation in self._evaluation:
            evaluation.rebind_tensors(root)

    def export_buffers(self, root: nn.Module) -> None:
        """Put this segment's buffers into ``root``, after this segment has moved."""
        for path, module in self.named_modules():
            for name, buffer in module._buffers.items():
                root.get_submodule(path)._buffers[name] = buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # nn.Module's to(), cuda(), half() all come here, but know parameters and buffers only.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.apply_to_constants(fn)
        for evaluation in self._evaluation:
            evaluation._apply(fn, recurse)
        return self

    def apply_to_constants(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or convert tensors that are neither parameters nor buffers."""
        for name, constant in self._constants.items():
            self._constants[name] = fn(constant)
            _set(self, name, self._constants[name])


@contextmanager
def running_checkpoints(segment: Segment, run: RunCheckpoint) -> Iterator[None]:
    """Run those of a segment's layers that are checkpoints by a function, inside the block."""
    before, segment._run_checkpoint = segment._run_checkpoint, run
    try:
        yield
    finally:
        segment._run_checkpoint = before


def has_checkpoints(segment: nn.Module) -> bool:
    """Return True if some of a segment's layers may run as checkpoints."""
    return isinstance(segment, Segment) and any(part.is_checkpoint for part in _parts_of(segment))


def list_repeated_weights(segment: Segment) -> list[nn.Parameter]:
    """Return the weights that autograd adds to more than once in a backward of a segment.

    A checkpoint's backward is one of its own, so that each part which reads a weight adds to it.
    """
    parts = _read_by_parts(segment)
    if parts and segment._references:  # modules that read others' weights by themselves
        return [*segment.parameters()]
    counts = Counter(weight for read in parts for weight in read)
    return [weight for weight in segment.parameters() if counts[weight] > 1]


def list_block_weights(segment: Segment) -> list[list[str]]:
    """Return the names of the weights that each part of a segment's code reads and no other."""
    counts = Counter(weight for read in _read_by_parts(segment) for weight in read)
    return [
        [name for name, one in segment.named_parameters() if one in read and counts[one] == 1]
        for read in _read_by_parts(segment)
    ]


def run_blocks_by(segment: Segment, run: RunBlock) -> None:
    """Have a function run every part of a segment's code from now on."""
    segment._run_block = run


def _parts_of(segment: Segment) -> tuple[Part, ...]:
    return segment._code.parts if isinstance(segment._code, PartedCode) else ()


def _read_by_parts(segment: Segment) -> list[set[nn.Parameter]]:
    return [
        {
            weight
            for target in part.targets
            for weight in _weights_of(attrgetter(target)(segment) if target else segment)
        }
        for part in _parts_of(segment)
    ]


def _weights_of(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, nn.Parameter):
        yield value


def get_segments(segment: Segment) -> tuple[Segment, ...]:
    """Return a segment and its evaluation segment: all that read its weights."""
    # Not a property of Segment, whose public names are those of the model's own modules.
    return (segment, *segment._evaluation)


def adopt_buffers(module: nn.Module, other: nn.Module) -> None:
    """Give a module the buffers that another one holds now under the same names."""
    theirs = dict(other.named_modules(remove_duplicate=False))
    for path, part in module.named_modules():
        held = theirs[path]._buffers if path in theirs else {}
        for name in part._buffers.keys() & held.keys():
            part._buffers[name] = held[name]


def get_constants(segment: Segment) -> Mapping[str, Tensor]:
    """Return a read-only view of a segment's tensors that are neither parameters nor buffers."""
    return MappingProxyType(segment._constants)


def get_references(segment: Segment) -> frozenset[str]:
    """Return the tensors that modules of a segment reach without holding them, by name."""
    # Whatever replaces a tensor in its own module does not replace it there.
    return segment._references


def get_whole_model(segment: Segment) -> nn.Module | None:
    """Return the opaque model that a segment calls as a whole, if it does."""
    return next(iter(segment._whole), None)


@dataclass(frozen=True)
class SegmentSpec:
    """The layers from ``first`` up to, not including, ``last``, to be built as a segment.

    It receives the values of ``inputs`` and returns those of ``outputs`` (nodes or constants), in
    order; ``enter`` is applied to every input, ``leave`` to every output. ``cuts`` are the
    positions of legal cuts, ascending; see `Segment.keyed`. ``checkpoints`` are spans of layers
    (first, behind the last) between legal cuts that may keep only what they take; with ``blocks``
    the other layers between two legal cuts run together, too (`run_blocks_by`);
    ``enter_checkpoint`` is applied to that, or ``copy_changed`` to what is changed in place.
    """

    program: Program
    layers: Layers
    first: int
    last: int
    inputs: Sequence[fx.Node]
    outputs: Sequence[Any]
    enter: Callable[[Any], Any] | None = None
    leave: Callable[[Any], Any] | None = None
    cuts: Sequence[int] = ()
    checkpoints: Sequence[tuple[int, int]] = ()
    enter_checkpoint: Callable[[Any], Any] | None = None
    copy_changed: Callable[[Any], Any] | None = None
    blocks: bool = False

    def build(self) -> Segment:
        program = self.program
        segment = Segment(program.fixed_mode, program.training)
        graph, attributes, spans, memory = self.copied(fx.Graph())
        for target, value in attributes.items():
            attach(segment, program.model, target, value)
        segment._code = self._compile(segment, graph, spans, memory)
        segment._references = frozenset(self.references)
        if any(WHOLE in node.meta for node in graph.nodes):
            # An opaque model is called as a whole; its tables are shared.
            segment._whole = (program.model,)
            for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(segment)[table] = vars(program.model)[table]
        if program.training:
            frozen = program.frozen_modules
            segment._kept_in_evaluation = tuple(m for m in segment.modules() if m in frozen)

        @functools.cache  # compiled on first use: most segments never run with keyed random numbers
        def get_keyed_code() -> Code:
            graph = fx.Graph()
            keyed = KeyedNodeCopier(program, self.layers, self.cuts, graph)
            graph, _, spans, memory = self.copied(graph, keyed.copy)
            return self._compile(segment, graph, spans, memory)

        segment._get_keyed_code = get_keyed_code
        return segment

    def _compile(
        self, segment: Segment, graph: fx.Graph, spans: Mapping[fx.Node, int], memory: Memory
    ) -> Code:
        if not self._spans:
            return _code(segment, graph)
        return split_into_parts(
            graph, spans, functools.partial(_code, segment), self.enter_checkpoint,
            self.copy_changed, memory, len(self.checkpoints),
        )  # fmt: skip

    @functools.cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Checkpoints and blocks, in which a layer belongs to the first that has it."""
        edges = [self.first, *(c for c in self.cuts if self.first < c < self.last), self.last]
        return [*self.checkpoints, *(pairwise(edges) if self.blocks else ())]

    def _span_of(self, layer: int) -> int:
        """Return the number of the checkpoint or block that a layer is in."""
        found = (at for at, (first, last) in enumerate(self._spans) if first <= layer < last)
        return next(found, NO_SPAN)

    @property
    def nodes(self) -> list[fx.Node]:
        layer_of = self.layers.layer_of
        return [
            node
            for node in self.program.graph.nodes
            if self.first <= layer_of.get(node, -1) < self.last
        ]

    @property
    def references(self) -> list[str]:
        return [name for node in self.nodes for name in references_of(node, self.program)]

    def copied(
        self,
        graph: fx.Graph,
        copy_node: Callable[[fx.Node, Mapping[fx.Node, fx.Node]], fx.Node] | None = None,
    ) -> tuple[fx.Graph, dict[str, Any], dict[fx.Node, int], Memory]:
        """Copy the operations to a graph.

        Returned are the graph, the attributes that its operations read, by name, and the span of
        each operation and its memory; see `split_into_parts`.
        """
        program, wanted, memory = self.program, self.nodes, Memory()
        copies = {
            node: graph.placeholder(f"input_{position}")
            for position, node in enumerate(self.inputs)
        }
        if self.enter:
            copies = {node: graph.call_function(self.enter, (c,)) for node, c in copies.items()}
        memory.held.update((copy, storages_of([node])) for node, copy in copies.items())
        needed = _with_constants(wanted, self.outputs, copies, self.layers)
        attributes: dict[str, Any] = {}
        spans: dict[fx.Node, int] = {}
        layer_of = self.layers.layer_of
        # In the program's order, which respects writes in place, not in the order of layers.
        for node in program.graph.nodes:
            if node not in needed or node in copies:
                continue
            before = next(iter(reversed(graph.nodes)), None)
            copy = (
                copy_node(node, copies)
                if copy_node
                else graph.node_copy(node, lambda source: copies[source])
            )
            if node.op in ("get_attr", "call_module"):
                target = str(node.target)
                if node.op == "get_attr":
                    target = _own_name(program, node, wanted)
                    copy.target = target
                attributes[target] = program.attribute(target)
                if isinstance(attributes[target], Tensor):
                    memory.lasting.add(storage_key(attributes[target]))
            copies[node] = copy
            memory.changed[copy] = changed_storages(node, program)
            memory.held[copy] = storages_of([node])
            if node in layer_of:
                # A keyed copy is preceded by operations of its own.
                for made in reversed(graph.nodes):
                    if made is before:
                        break
                    spans[made] = self._span_of(layer_of[node])
                    if made is not copy:  # may pass on what it reads
                        shared = [memory.held.get(each, set()) for each in made.all_input_nodes]
                        memory.held[made] = set().union(*shared)
        # Modules read these by themselves; held, they are saved, tied and summed like any other.
        attributes.update((name, program.attribute(name)) for name in self.references)
        self._add_output(graph, copies)
        return graph, attributes, spans, memory

    def _add_output(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
        results = [copies[out] if isinstance(out, fx.Node) else out for out in self.outputs]
        if self.leave:
            results = [
                graph.call_function(self.leave, (out,)) if isinstance(out, fx.Node) else out
                for out in results
            ]
        graph.output(tuple(results))
        graph.lint()


def _with_constants(
    wanted: list[fx.Node], outputs: Iterable[Any], given: dict[fx.Node, fx.Node], layers: Layers
) -> set[fx.Node]:
    """Return the wanted nodes with the attributes and constants that they read."""
    needed = set(wanted)
    pending = [*wanted, *(out for out in outputs if isinstance(out, fx.Node))]
    while pending:
        node = pending.pop()
        if node in given:
            continue
        if node.op == "get_attr" or node in layers.constant:
            needed.add(node)
        for source in node.all_input_nodes:
            if source not in needed and (source.op == "get_attr" or source in layers.constant):
                needed.add(source)
                pending.append(source)
    return needed


def _own_name(program: Program, node: fx.Node, wanted: list[fx.Node]) -> str:
    """Return the name by which the reading module knows a tied parameter."""
    # The tracer may have recorded the other module's name, which this segment need not hold.
    target = str(node.target)
    value = program.attribute(target)
    readers = {path_of(user) for user in node.users if user in set(wanted)}
    for reader in sorted(readers):
        for name, parameter in program.model.named_parameters(remove_duplicate=False):
            if parameter is value and name.rpartition(".")[0] == reader:
                return name
    return target


def mutates_inputs(program: Program, layers: Layers, first: int, last: int) -> bool:
    """Return True if an operation in these layers may change the segment's inputs in place."""
    changed = [
        node
        for reader, layer in layers.layer_of.items()
        if first <= layer < last
        for node in mutated_inputs(reader, program)
    ]
    return bool(storages_of(changed) & storages_of(program.inputs)) if first == 0 else bool(changed)


def _code(segment: Segment, graph: fx.Graph) -> Code:
    """Compile a graph to a function that takes the segment as its first argument."""
    # Only the generated function is used: a GraphModule registers every plain tensor as a
    # persistent buffer, which would change the names in the model's state_dict.
    code: Code = type(fx.GraphModule(segment, graph)).forward
    return code


def attach(segment: Segment, model: nn.Module, target: str, value: Any) -> None:
    """Set a module, parameter, buffer or constant by its dotted name."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        owner, _, name = target.rpartition(".")
        source = find_module(model, owner)
        if source is not None and name in source._buffers:
            persistent = name not in source._non_persistent_buffers_set
            _parent(segment, target).register_buffer(name, value, persistent=persistent)
            return
        segment._constants[target] = value
    _set(segment, target, value)


def _parent(root: nn.Module, target: str) -> nn.Module:
    """Return the parent module of ``target``, creating empty modules on the way."""
    parent = root
    for part in target.split(".")[:-1]:
        child = parent._modules.get(part)
        if child is None:
            child = nn.Module()
            parent.add_module(part, child)
        parent = child
    return parent


def _set(root: nn.Module, target: str, value: Any) -> None:
    parent, name = _parent(root, target), target.rpartition(".")[2]
    if isinstance(value, nn.Module):
        parent.add_module(name, value)
    else:
        setattr(parent, name, value)


def adopt_unused(segment: Segment, model: nn.Module, names: Iterable[str]) -> None:
    """Add parameters and buffers that no layer uses to a segment, so that none is lost."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        source = model.get_submodule(parent)
        attach(segment, model, name, getattr(source, leaf))
