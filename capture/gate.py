"""Checks that a traced model is the model: wrong captures must be loud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.errors import CaptureError, InvalidInput
from ..core.graph import Boundary
from .difference import relative_difference
from .pieces import PieceRun
from .sample import CallStructure
from .state import preserved

RELATIVE_TOLERANCE = 1e-3
"""A wrong graph is off by far more; another kernel for the same operation (flash instead of math
attention) by far less. Precisions below single get more, see `_tolerance`."""

GRADIENT_FLOOR = 1e-5
"""Gradients smaller than this share of the largest one are rounding, such as those of a bias
before a normalisation."""


@dataclass(frozen=True)
class Behaviour:
    """What a model did on a sample: flat outputs, gradients by name, buffers by name."""

    outputs: list[Any]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def eager_behaviour(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]
) -> Behaviour:
    """The model itself, forwards and backwards, from the current random state.

    Raises:
        InvalidInput: The model fails on this sample by itself.
        CaptureError: It changes its own parameters, or holds a custom autograd function.
    """
    versions = {name: p._version for name, p in model.named_parameters()}
    with preserved(model), torch.enable_grad():
        args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
        try:
            output = model(*args, **kwargs)
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise InvalidInput(
                f"{type(model).__name__} itself fails on this sample: "
                f"{type(error).__name__}: {reason[0] if reason else ''}",
                field="/sample/inputs",
            ) from error
        leaves = pytree.tree_flatten(output)[0]
        if type(model) is not nn.Sequential:
            _refuse_custom_functions(leaves)
        for name, parameter in model.named_parameters():
            if parameter._version != versions[name]:
                raise CaptureError(
                    f"forward changes its own parameter {name!r} in place; do that after the "
                    "optimizer's step instead",
                    operation=name,
                )
        try:
            return _behaviour(model, leaves, lambda: None)
        except RuntimeError as error:
            raise InvalidInput(
                f"{type(model).__name__} itself fails in its backward pass: "
                f"{str(error).splitlines()[0]}"
            ) from error


def pieces_behaviour(
    model: nn.Module,
    pieces: Sequence[nn.Module],
    boundaries: Sequence[Boundary],
    flat: Sequence[Tensor],
) -> Behaviour:
    """The same for the traced model, cut wherever it may be, from the current random state."""
    with preserved(model), torch.enable_grad():
        run = PieceRun(pieces, boundaries, [tensor.clone() for tensor in flat], copy=True)
        return _behaviour(model, list(run.outputs), run.hand_back)


def _behaviour(model: nn.Module, leaves: list[Any], rest: Callable[[], None]) -> Behaviour:
    """Differentiate outputs for fixed pseudo-random cotangents, and copy what there is to see."""
    for parameter in model.parameters():
        parameter.grad = None
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_cotangent(root) for root in roots])
        rest()
    named = model.named_parameters()
    return Behaviour(
        outputs=[leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        gradients={name: p.grad for name, p in named if p.grad is not None},
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def _cotangent(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(output.numel())
    values = torch.rand(output.shape, generator=generator) + 0.5
    return values.to(output.device, output.dtype)


def compare(found: Behaviour, expected: Behaviour) -> None:
    """Insist that the traced model behaves as the model.

    Raises:
        CaptureError: It does not; the message says what differs and by how much.
    """
    tolerance = _tolerance(expected)
    for position, (ours, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if isinstance(theirs, Tensor):
            _insist(relative_difference(ours, theirs), tolerance, f"output {position}")
    norms = [float(gradient.norm()) for gradient in expected.gradients.values()]
    floor = GRADIENT_FLOOR * max(norms, default=0.0)
    for name in sorted({*found.gradients, *expected.gradients}):
        ours = found.gradients.get(name)
        theirs = expected.gradients.get(name)
        there = theirs if theirs is not None else ours
        assert there is not None
        zero = torch.zeros_like(there)
        error = relative_difference(
            zero if ours is None else ours, zero if theirs is None else theirs, floor=floor
        )
        _insist(error, tolerance, f"the gradient of {name!r}")
    for name, buffer in expected.buffers.items():
        _insist(relative_difference(found.buffers[name], buffer), tolerance, f"the buffer {name!r}")


def _insist(error: float, tolerance: float, what: str) -> None:
    if not error <= tolerance:
        raise CaptureError(
            f"the traced model is not the model: {what} differs by {error:.2g} (relative). "
            "Something in forward escapes the tracer: hooks, Python's own random numbers, state "
            "kept outside buffers, or a custom derivative"
        )


def _tolerance(behaviour: Behaviour) -> float:
    floating = [
        leaf.dtype
        for leaf in (*behaviour.outputs, *behaviour.gradients.values())
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return max([RELATIVE_TOLERANCE, *(20 * float(torch.finfo(dtype).eps) for dtype in floating)])


def follows_mode(
    model: nn.Module, structure: CallStructure, piece: nn.Module, flat: Sequence[Tensor]
) -> bool:
    """Whether the traced model, switched to evaluation, still does what the model does then."""
    with preserved(model, training=False), torch.no_grad():
        args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
        expected = pytree.tree_flatten(model(*args, **kwargs))[0]
        piece.train(False)
        found = piece(*[tensor.clone() for tensor in flat])
    if len(found) != len(expected):
        return False
    return all(
        relative_difference(ours, theirs) <= RELATIVE_TOLERANCE
        for ours, theirs in zip(found, expected, strict=True)
        if isinstance(theirs, Tensor) and isinstance(ours, Tensor)
    )


def _refuse_custom_functions(outputs: list[Any]) -> None:
    """Refuse models whose autograd graph holds a Python ``autograd.Function``.

    Tracers replace such a function by the derivative of its forward, silently.
    """
    pending = [leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor) and leaf.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            raise CaptureError(
                f"the custom autograd function {name!r} would lose its own backward when traced",
                operation=name,
            )
        pending += [parent for parent, _ in node.next_functions if parent is not None]
