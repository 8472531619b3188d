"""Activation checkpointing: keep a stage's inputs, and recompute its activations in backward.

Two nodes of the autograd graph do this, in the order backward meets them::

    Recompute               runs the stage's forward again, while the gradient is being copied
    (the stage waits for the copy of the gradient; see `copy`)
    ActivationCheckpoint    runs the backward of what was recomputed
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ...core.errors import InvalidInput
from ..changed_buffers import ChangedBuffers
from ..random_state import RandomState
from .checkpoint_state import set_flag
from .dependency import first_differentiable
from .thread_modes import ThreadModes

Values = tuple[Any, ...]


class ActivationCheckpoint(torch.autograd.Function):
    """Autograd node of a stage run without a graph; see `Recomputation.backward`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, recomputation: Recomputation, token: Tensor, *inputs: Any
    ) -> Values:
        # An output without a gradient passes None, not zeros: `backward` leaves it out.
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation  # type: ignore[attr-defined]
        ctx.others = {  # type: ignore[attr-defined]
            i: value for i, value in enumerate(inputs) if not isinstance(value, Tensor)
        }
        outputs = recomputation.run_first(inputs)
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)))
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        # The weights' gradients are no results of this node: they are added to `.grad` on the way.
        # Private, but torch.utils.checkpoint asks it for this reason (reentrant checkpoints).
        if not torch.autograd._is_checkpoint_valid() or torch.is_grad_enabled():
            raise InvalidInput(
                "torch.autograd.grad(), backward(inputs=...) and create_graph=True do not work "
                "across a stage that recomputes its activations; use backward() alone, or build "
                "the pipeline with checkpoint='never'"
            )
        return None, None, *_recomputation_of(ctx).backward(_inputs_of(ctx), gradients)


# The node's name in the graph stays torchgpipe's, by which programs and tests find it.
ActivationCheckpoint._backward_cls.__name__ = "CheckpointBackward"


class Recompute(torch.autograd.Function):
    """Identity whose backward runs the stage's forward again."""

    @staticmethod
    def forward(ctx: FunctionCtx, node: FunctionCtx, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = node  # type: ignore[attr-defined]
        return value.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        node = ctx.node  # type: ignore[attr-defined]
        _recomputation_of(node).recompute(_inputs_of(node))
        return None, gradients[0]


def _recomputation_of(node: FunctionCtx) -> Recomputation:
    recomputation: Recomputation = node.recomputation  # type: ignore[attr-defined]
    return recomputation


def _inputs_of(node: FunctionCtx) -> Values:
    """Return the stage's inputs; tensors come from autograd, which frees them after backward."""
    saved: Values = node.saved_tensors  # type: ignore[attr-defined]
    others: dict[int, Any] = node.others  # type: ignore[attr-defined]
    tensors = iter(saved)
    return tuple(
        others[i] if i in others else next(tensors) for i in range(len(saved) + len(others))
    )


def checkpoint(
    function: Callable[[Values], Values],
    module: nn.Module,
    changed: ChangedBuffers,
    inputs: Values,
    token: Tensor | None,
) -> tuple[Values, Any]:
    """Run a stage so that only its inputs are kept for backward; ``changed`` are its buffers.

    The outputs depend on the token (see `dependency.fork`). Returned with them is the node for
    `recompute_before`, `None` if no output requires a gradient.
    """
    if token is None:  # without a differentiable input, autograd would skip the parameters
        token = torch.empty(0, requires_grad=True)
    recomputation = Recomputation(function, module, changed)
    outputs: Values = ActivationCheckpoint.apply(recomputation, token, *inputs)  # type: ignore[no-untyped-call]
    index = first_differentiable(outputs)
    return outputs, None if index is None else outputs[index].grad_fn


def recompute_before(values: Values, node: Any) -> Values:
    """Start the recomputation when a gradient of these values arrives."""
    index = first_differentiable(values)
    if node is None or index is None:
        return values
    value = Recompute.apply(node, values[index])  # type: ignore[no-untyped-call]
    return (*values[:index], value, *values[index + 1 :])


# The CPU's generators are shared by the process, and autograd runs one thread per device.
_lock = threading.RLock()


def _drop_unused(before: RandomState, device: torch.device) -> RandomState:
    """Drop the CPU's states if nothing was drawn since, so that other threads may use them."""
    now = RandomState.now(device)
    assert before.cpu is not None
    assert now.cpu is not None
    is_same = before.cpu[1] == now.cpu[1] and torch.equal(before.cpu[0], now.cpu[0])
    return dataclasses.replace(before, cpu=None) if is_same else before


@contextmanager
def restore_generators(then: RandomState, device: torch.device) -> Iterator[None]:
    """Draw the numbers that followed ``then``; the generators' own states are restored after."""
    # A stage that draws nothing on the CPU restores nothing there, and need not wait for other
    # devices' recomputations.
    with _lock if then.cpu is not None else nullcontext():
        now = RandomState.now(device)
        then.restore(device)
        try:
            yield
        finally:
            dataclasses.replace(now, cpu=now.cpu if then.cpu is not None else None).restore(device)


class Recomputation:
    """Forward of one micro-batch, run first without a graph and in backward again with one.

    The second run draws equal random numbers, finds equal buffers, uses the same autocast, and
    changes neither buffers nor generators. Weights and modes must be those of the first.
    """

    def __init__(
        self, function: Callable[[Values], Values], module: nn.Module, changed: ChangedBuffers
    ) -> None:
        self._function = function
        self._module, self._changed_buffers = module, changed
        self._graph: tuple[Values, Values] | None = None

    def run_first(self, inputs: Values) -> Values:
        """Run without a graph, and record what the second run needs."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._modes = dataclasses.replace(ThreadModes.current(), grad=True)
        before, versions = RandomState.now(self._device), _versions(inputs)
        with set_flag("checkpointing"), self._changed_buffers.record() as self._buffers:
            outputs = self._function(inputs)
        self._trains = [(each, each.training) for each in self._module.modules()]
        # Writes to ``.data`` in place are not counted, and stay unseen.
        self._weights = [(each, _identity(each)) for each in self._module.parameters()]
        self._generators = _drop_unused(before, self._device)
        # Inputs changed in place: a second run would start from the changed values.
        self._changed = {
            index
            for index, (old, new) in enumerate(zip(versions, _versions(inputs), strict=True))
            if old != new and not inputs[index].requires_grad
        }
        return outputs

    def recompute(self, inputs: Values) -> None:
        """Run with a graph, for `backward`."""
        changed = [
            *("weights were changed" for each, was in self._weights if _identity(each) != was),
            *("train() or eval() was called" for each, was in self._trains if each.training != was),
        ]
        if changed:
            raise InvalidInput(
                f"{changed[0]} between the forward and the backward of a stage that recomputes its "
                "activations, so its gradients would be wrong; call backward() first, or build the "
                "pipeline with checkpoint='never'"
            )
        leaves = tuple(_leaf(v, i in self._changed) for i, v in enumerate(inputs))
        with (
            self._modes.activate(),
            restore_generators(self._generators, self._device),
            self._changed_buffers.use_copies(self._buffers),
            set_flag("recomputing"),
        ):
            outputs = self._function(leaves)
        # A change that has no effect when repeated, such as `relu_`, is allowed.
        for index in self._changed:
            if not torch.equal(leaves[index], inputs[index]):
                raise RuntimeError(
                    f"input {index} of a checkpointed stage was used in an in-place operation, and "
                    "recomputation changes it again; use an out-of-place operation, or "
                    "checkpoint='never'"
                )
        self._graph = outputs, leaves

    def backward(self, inputs: Values, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs."""
        if self._graph is None:  # the output that triggers recomputation has no gradient
            self.recompute(inputs)
        assert self._graph is not None
        # The node may outlive this backward; the recomputed activations must not.
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


def _identity(weight: nn.Parameter) -> tuple[int, int]:
    """Return what changes with a weight's values: its version, and its memory for ``.data =``."""
    return weight._version, weight.data_ptr()


def _versions(values: Values) -> list[int]:
    return [value._version if isinstance(value, Tensor) else 0 for value in values]


def _leaf(value: Any, changed: bool) -> Any:
    """Return an input for the second run, detached from the graph before it."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().clone() if changed else value.detach()
    return leaf.requires_grad_(value.requires_grad)
