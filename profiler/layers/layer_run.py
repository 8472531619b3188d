"""Layer runs: one layer each, ready to run forwards and backwards, alone or in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.captured import Captured
from ...capture.program.cuts import differentiable_nodes
from ...capture.program.mutation import changed_storages
from ...capture.program.program import storages_of, tensors_of
from ...capture.program.segment import Segment, SegmentSpec

Values = Mapping[fx.Node, Any]
"""What nodes produced: tensors, or tuples of them."""


@dataclass
class LayerRun:
    """Callable layer of the model with the values it reads and writes.

    Attributes:
        name: For progress and error messages.
        function: Flat tensors in, flat values out.
        reads: Nodes whose values it takes, in order.
        writes: Nodes whose values it makes, in order; `None` for a value no layer reads.
        needs_grad: For each input, whether a gradient is to be computed for it.
        changed: For each input, whether the layer may change it in place: it is given a copy.
        parameters: Trainable parameters it uses.
        segment: What `function` runs, as a module; `None` for the loss.
        parameter_bytes: Of all parameters it uses.
        saved_bytes: What it keeps for its backward; `None` before its first run.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    reads: list[fx.Node]
    writes: list[fx.Node | None]
    needs_grad: list[bool]
    changed: list[bool]
    parameters: list[Tensor]
    segment: Segment | None = None
    parameter_bytes: int = 0
    saved_bytes: int | None = None

    def leaves(self, values: Values) -> list[Any]:
        """Return the layer's inputs, detached from what produced them."""
        return [
            detached(values[node], needed)
            for node, needed in zip(self.reads, self.needs_grad, strict=True)
        ]

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the call's arguments: the leaves, copied where the layer would change them."""
        return [
            mapped(torch.clone, leaf) if changed else leaf
            for leaf, changed in zip(leaves, self.changed, strict=True)
        ]


def layer_runs(captured: Captured) -> list[LayerRun]:
    """Cut a traced model into layers that read and write only what they use themselves."""
    program, layers = captured.program, captured.layers
    differentiable = differentiable_nodes(program)
    count = len(layers)
    runs = []
    for index in range(count):
        before = program.inputs if index == 0 else list(captured.cuts[index - 1].nodes)
        if index + 1 == count:
            behind = [node for node in program.flat_outputs if isinstance(node, fx.Node)]
        else:
            behind = list(captured.cuts[index].nodes)
        # Not all values that pass a cut: one that skips this layer must not be detached here.
        reads = [
            node
            for node in before
            if any(layers.layer_of.get(user) == index for user in node.users)
        ]
        writes = list(dict.fromkeys(n for n in behind if layers.layer_of.get(n) == index))
        segment = SegmentSpec(program, layers, index, index + 1, reads, writes).build()
        runs.append(
            LayerRun(
                name=layers.names[index],
                function=segment,
                reads=reads,
                writes=[*writes],
                needs_grad=[node in differentiable for node in reads],
                changed=_changed(captured, index, reads),
                parameters=[p for p in segment.parameters() if p.requires_grad],
                segment=segment,
                parameter_bytes=bytes_of(list(segment.parameters())),
            )
        )
    return runs


def bytes_of(value: Any) -> int:
    """Sum the bytes of the tensors in a value; shared memory counts for each."""
    return sum(tensor.nbytes for tensor in tensors_of(value))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to a tensor, or to every tensor in a tuple or list."""
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def detached(value: Any, needs_grad: bool = False) -> Any:
    """Detach values from their history; differentiable ones require gradients if asked."""

    def detach(tensor: Tensor) -> Tensor:
        is_differentiable = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(needs_grad and is_differentiable)

    return mapped(detach, value)


def _changed(captured: Captured, index: int, reads: Sequence[fx.Node]) -> list[bool]:
    """Flag the inputs that share memory with something a layer changes in place."""
    program = captured.program
    # By storage, not by value: a change through one view shows in every other view.
    touched = {
        key
        for node, layer in captured.layers.layer_of.items()
        if layer == index
        for key in changed_storages(node, program)
    }
    return [not touched.isdisjoint(storages_of([node])) for node in reads]


def backward_pairs(outputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that take part in backward, and a gradient of ones for each."""
    roots = [out for out in tensors_of(list(outputs)) if out.requires_grad]
    return roots, [torch.ones_like(out) for out in roots]
