"""Deferred batch normalisation in one process: running statistics of whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def deferred_statistics(root: nn.Module) -> Iterator[None]:
    """Update a model's running statistics once, at the end, by the moments of all micro-batches.

    Each micro-batch is still normalised by its own statistics. Layers in evaluation mode are left
    unchanged.
    """
    with ExitStack() as stack:
        kept = [
            stack.enter_context(_collect_moments(module))
            for module in root.modules()
            if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
        ]
        yield
        stack.close()  # layers track statistics again before theirs are moved
        for moments in kept:
            moments.commit()


class _Moments:
    """Count, mean and sum of squared deviations of each channel, merged over micro-batches.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979. Unlike sums of squares they do not suffer from cancellation.
    """

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        self._count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the values about to be normalised (a forward pre-hook)."""
        values = inputs[0].detach()
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        count = values.numel() // values.shape[1]
        if not count:
            return
        with torch.no_grad():
            dims = [dim for dim in range(values.dim()) if dim != 1]
            variance, mean = torch.var_mean(values, dims, correction=0)
            self._merge(count, mean, variance * count)

    def _merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        if self._mean is None or self._squares is None:
            self._count, self._mean, self._squares = count, mean, squares
            return
        total = self._count + count
        delta = mean - self._mean
        self._squares = self._squares + squares + delta**2 * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = total

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics as the layer itself would for the whole batch."""
        module, mean = self._module, self._mean
        if mean is None or self._squares is None:
            return
        assert module.num_batches_tracked is not None
        assert module.running_mean is not None
        assert module.running_var is not None
        module.num_batches_tracked += 1
        factor: float | Tensor | None = module.momentum
        if factor is None:  # on its device: the host would wait to read it
            factor = module.num_batches_tracked.to(module.running_mean.dtype).reciprocal()
        variance = self._squares / max(self._count - 1, 1)
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
        module.running_var.lerp_(variance.to(module.running_var.dtype), factor)


@contextmanager
def _collect_moments(module: _BatchNorm) -> Iterator[_Moments]:
    """Collect the moments of a layer's inputs instead of letting it track statistics.

    Recomputed forwards run in the backward, after this context, and are not counted twice.
    """
    moments = _Moments(module)
    hook = module.register_forward_pre_hook(moments.add)
    module.track_running_stats = False
    try:
        yield moments
    finally:
        module.track_running_stats = True
        hook.remove()
