"""Activation checkpoints inside a stage: layers keep inputs and run again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...capture.program.segment import Segment, running_checkpoints
from ..changed_buffers import ChangedBuffers
from .checkpoint import checkpoint
from .checkpoint_state import is_recomputing

Values = tuple[Any, ...]


@contextmanager
def _without_conversions() -> Iterator[None]:
    """Keep autocast from keeping weights it converts: without a graph, others could not train."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class LayerCheckpoints:
    """Runs those layers of a stage that its plan checkpoints.

    ``watched`` are modules whose weights and modes must not change between a forward and its
    backward.
    """

    def __init__(self, segment: Segment, watched: nn.Module) -> None:
        self._segment, self._watched = segment, watched
        # Each part has its own: a buffer that one changes may be left alone by the others.
        self._changed: dict[int, ChangedBuffers] = {}
        self._trained: dict[tuple[object, ...], tuple[bool, ...]] = {}

    def active(
        self, again: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> AbstractContextManager[None]:
        """Return a context for forwards with checkpoints; ``again`` is that of the second run."""
        # What may change between steps, and with it which outputs lead back to a weight.
        state = (
            tuple(weight.requires_grad for weight in self._segment.parameters()),
            tuple(module.training for module in self._segment.modules()),
        )
        return running_checkpoints(self._segment, partial(self._run, again, state))

    def _run(
        self,
        again: Callable[[], AbstractContextManager[Any]],
        state: tuple[object, ...],
        number: int,
        function: Callable[[Values], Values],
        values: Values,
    ) -> Values:
        if not torch.is_grad_enabled():
            return function(values)
        if number not in self._changed:
            self._changed[number] = ChangedBuffers(self._segment)
        flat, structure = pytree.tree_flatten(values)
        made: list[pytree.TreeSpec] = []
        key = number, state, tuple(map(_needs_gradient, flat))

        def work(flat: Sequence[Any]) -> Values:
            # Without a graph nobody knows which outputs lead back to a weight: one run tells.
            learns = key not in self._trained
            with (
                again() if is_recomputing() else _without_conversions(),
                torch.enable_grad() if learns else nullcontext(),
            ):
                outputs = function(pytree.tree_unflatten(list(flat), structure))
            leaves, spec = pytree.tree_flatten(outputs)
            made.append(spec)
            if learns:
                self._trained[key] = tuple(map(_needs_gradient, leaves))
            return tuple(leaves)

        outputs, _ = checkpoint(work, self._watched, self._changed[number], tuple(flat), None)
        leaves = [
            value if is_trained or not isinstance(value, Tensor) else value.detach()
            for value, is_trained in zip(outputs, self._trained[key], strict=True)
        ]
        return tuple(pytree.tree_unflatten(leaves, made[0]))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
