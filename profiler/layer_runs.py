"""One layer with its real inputs, ready to be run alone, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.capture import Captured
from ..capture.cuts import differentiable_nodes
from ..capture.program import value_of
from ..capture.segment import make_segment


@dataclass
class LayerRun:
    """A callable piece of the model and the values it is given.

    Attributes:
        name: For progress and error messages.
        function: Flat tensors in, flat values out.
        reads: Nodes whose values it takes, in order.
        writes: Nodes whose values it makes, in order.
        needs_grad: For each input, whether a gradient is to be computed for it.
        in_place: Whether it may change its inputs, and so must be given copies.
        parameters: Trainable parameters it uses.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    reads: list[fx.Node]
    writes: list[fx.Node]
    needs_grad: list[bool]
    in_place: bool
    parameters: list[Tensor]

    def inputs(self, values: dict[fx.Node, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves to differentiate for, and the tensors to call with (copies where needed)."""
        leaves = [
            values[node].detach().requires_grad_(needed)
            for node, needed in zip(self.reads, self.needs_grad, strict=True)
        ]
        if not self.in_place:
            return leaves, leaves
        return leaves, [leaf.clone() for leaf in leaves]

    def targets(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """What its backward pass computes gradients for."""
        return [leaf for leaf in leaves if leaf.requires_grad] + self.parameters


def layer_runs(captured: Captured) -> list[LayerRun]:
    """Every layer of a traced model, reading and writing only what it uses itself."""
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
        reads = [
            node
            for node in before
            if any(layers.layer_of.get(user) == index for user in node.users)
        ]
        writes = list(dict.fromkeys(n for n in behind if layers.layer_of.get(n) == index))
        segment = make_segment(program, layers, index, index + 1, reads, writes)
        runs.append(
            LayerRun(
                name=layers.names[index],
                function=segment,
                reads=reads,
                writes=writes,
                needs_grad=[node in differentiable and _is_floating(node) for node in reads],
                in_place=captured.mutates_inputs(index, index + 1),
                parameters=[p for p in segment.parameters() if p.requires_grad],
            )
        )
    return runs


def _is_floating(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def backward_pairs(outputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs that take part in the backward pass, and a gradient of ones for each."""
    roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    return roots, [torch.ones_like(out) for out in roots]
