"""Keep a stage's inputs instead of what it computed, and compute that again in the backward.

Two nodes of the graph do it, in the order the backward meets them::

    Recompute    runs the stage's forward again, while the gradient may still be on its way
    (the stage waits for the gradient to be copied here; see `travel`)
    Checkpoint   runs the backward of what was just computed
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from .checkpoint_state import checkpointing, recomputing
from .dependency import first_differentiable
from .thread_modes import Surroundings

Values = tuple[Any, ...]


class Checkpoint(torch.autograd.Function):
    """The stage without its graph; the backward is `Rerun.backward`'s."""

    @staticmethod
    def forward(ctx: FunctionCtx, rerun: Rerun, token: Tensor, *inputs: Any) -> Values:
        ctx.set_materialize_grads(False)
        ctx.rerun = rerun  # type: ignore[attr-defined]
        ctx.others = {  # type: ignore[attr-defined]
            i: value for i, value in enumerate(inputs) if not isinstance(value, Tensor)
        }
        outputs = rerun.first(inputs)
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)))
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return None, None, *_rerun_of(ctx).backward(_inputs_of(ctx), gradients)


class Recompute(torch.autograd.Function):
    """An identity; its backward runs the stage's forward again."""

    @staticmethod
    def forward(ctx: FunctionCtx, node: FunctionCtx, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = node  # type: ignore[attr-defined]
        return value.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        node = ctx.node  # type: ignore[attr-defined]
        _rerun_of(node).again(_inputs_of(node))
        return None, gradients[0]


def _rerun_of(node: FunctionCtx) -> Rerun:
    rerun: Rerun = node.rerun  # type: ignore[attr-defined]
    return rerun


def _inputs_of(node: FunctionCtx) -> Values:
    """Of a `Checkpoint`, tensors from where autograd keeps them until the backward is over."""
    saved: Values = node.saved_tensors  # type: ignore[attr-defined]
    others: dict[int, Any] = node.others  # type: ignore[attr-defined]
    tensors = iter(saved)
    return tuple(
        others[i] if i in others else next(tensors) for i in range(len(saved) + len(others))
    )


def checkpoint(
    function: Callable[[Values], Values], module: nn.Module, inputs: Values, token: Tensor | None
) -> tuple[Values, Any]:
    """Run a stage so that its inputs are all that is kept for the backward.

    Args:
        function: From its inputs to its outputs.
        module: The stage's module.
        inputs: Tensors and other values.
        token: See `order.fork`; the outputs depend on it.

    Returns:
        The outputs, and the node to hand to `recompute_before`; `None` if no output has a gradient.
    """
    if token is None:  # something has to have a gradient, or parameters would get none
        token = torch.empty(0, requires_grad=True)
    outputs: Values = Checkpoint.apply(Rerun(function, module), token, *inputs)  # type: ignore[no-untyped-call]
    index = first_differentiable(outputs)
    return outputs, None if index is None else outputs[index].grad_fn


def recompute_before(values: Values, node: Any) -> Values:
    """Have the second run begin when a gradient for these values is known."""
    index = first_differentiable(values)
    if node is None or index is None:
        return values
    value = Recompute.apply(node, values[index])  # type: ignore[no-untyped-call]
    return (*values[:index], value, *values[index + 1 :])


@contextmanager
def buffers_aside(module: nn.Module) -> Iterator[None]:
    """The module works on copies of its buffers inside, and has its own again afterwards.

    Copies rather than values put back: batch normalisation's native operation changes running
    statistics without counting it as a change, so that nothing tells which to put back; and what
    is written after autograd has saved it makes the backward fail.
    """
    copies: dict[Tensor, Tensor] = {}
    places: list[tuple[nn.Module, str, Tensor]] = []
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                places.append((part, name, buffer))
                copies.setdefault(buffer, buffer.clone())
    try:
        for part, name, buffer in places:
            part._buffers[name] = copies[buffer]
        yield
    finally:
        for part, name, buffer in places:
            part._buffers[name] = buffer


# The CPU's generators are one for the whole process, and backwards of several devices are threads.
_lock = threading.RLock()


@dataclass(frozen=True)
class Generators:
    """Where generators stood.

    Attributes:
        cpu: torch's on the CPU and Python's `random`; `None` if nothing was drawn from them.
        gpu: That of the stage's GPU, if it is on one.
    """

    cpu: tuple[Tensor, Any] | None
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Where they stand."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls((torch.get_rng_state(), random.getstate()), gpu)

    def restore(self, device: torch.device) -> None:
        """Draw from here on what was drawn after this was taken."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu[0])
            random.setstate(self.cpu[1])
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)

    def where_drawn(self, device: torch.device) -> Generators:
        """Without those that still stand where they stood: others may use them meanwhile."""
        now = Generators.now(device)
        assert self.cpu is not None
        assert now.cpu is not None
        same = self.cpu[1] == now.cpu[1] and torch.equal(self.cpu[0], now.cpu[0])
        return Generators(None if same else self.cpu, self.gpu)


@contextmanager
def drawing_from(then: Generators, device: torch.device) -> Iterator[None]:
    """Draw inside what was drawn after ``then``; generators do not move by it."""
    with _lock if then.cpu is not None else nullcontext():
        now = Generators.now(device)
        then.restore(device)
        try:
            yield
        finally:
            Generators(now.cpu if then.cpu is not None else None, now.gpu).restore(device)


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
