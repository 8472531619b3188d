"""A stage's forward, run once without a graph and again, just the same, with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .buffers_tomerge import buffers_aside
from .checkpoint_state import checkpointing, recomputing
from .generators_tomerge import Generators, drawing_from
from .thread_modes import Surroundings

Values = tuple[Any, ...]


class Rerun:
    """A stage's forward of one micro-batch: run first without a graph, then again with one.

    The second run draws the same random numbers, under the same autocast, and leaves buffers and
    generators as they are.

    Args:
        function: From the stage's inputs to its outputs.
        module: Whose buffers the second run must not change.
    """

    def __init__(self, function: Callable[[Values], Values], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._graph: tuple[Values, Values] | None = None

    def first(self, inputs: Values) -> Values:
        """Run without a graph, and remember what the second run needs."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._surroundings = dataclasses.replace(Surroundings.here(), grad=True)
        before, versions = Generators.now(self._device), _versions(inputs)
        with checkpointing():
            outputs = self._function(inputs)
        self._generators = before.where_drawn(self._device)
        self._changed = {
            index
            for index, (old, new) in enumerate(zip(versions, _versions(inputs), strict=True))
            if old != new and not inputs[index].requires_grad
        }
        return outputs

    def again(self, inputs: Values) -> None:
        """Run with a graph, which `backward` goes back through.

        Raises:
            RuntimeError: The stage changes an input in place, and a second run changes it further.
        """
        leaves = tuple(_leaf(v, i in self._changed) for i, v in enumerate(inputs))
        with (
            self._surroundings.entered(),
            drawing_from(self._generators, self._device),
            buffers_aside(self._module),
            recomputing(),
        ):
            outputs = self._function(leaves)
        for index in self._changed:
            if not torch.equal(leaves[index], inputs[index]):
                raise RuntimeError(
                    f"input {index} of a checkpointed stage was used in an in-place operation, and "
                    "a second run changes it again; use an operation that is not in place, or "
                    "checkpoint='never'"
                )
        self._graph = outputs, leaves

    def backward(self, inputs: Values, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs."""
        if self._graph is None:  # the output that triggers it is not part of the loss
            self.again(inputs)
        assert self._graph is not None
        (outputs, leaves), self._graph = self._graph, None
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        if pairs:
            roots, root_gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, root_gradients)
        return [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]


def _versions(values: Values) -> list[int]:
    return [value._version if isinstance(value, Tensor) else 0 for value in values]


def _leaf(value: Any, changed: bool) -> Any:
    """What a second run is given for an input: the same values, without what led to them."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().clone() if changed else value.detach()
    return leaf.requires_grad_(value.requires_grad)
