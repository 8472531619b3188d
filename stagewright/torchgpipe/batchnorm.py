"""Batch normalisation with running statistics over whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..runtime.local.checkpoint_state import is_recomputing

__all__ = ["DeferredBatchNorm"]


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation per micro-batch whose running statistics are updated once per batch.

    Like torchgpipe's, but also for 2-dimensional tensors. The running variance is the biased
    variance of the batch, unlike that of ``nn.BatchNorm``.

    Args:
        num_features: Number of channels.
        eps: Added to the variance.
        momentum: Weight of a new batch in the running statistics; `None` for a plain average.
        affine: Learn a weight and a bias.
        chunks: Micro-batches per batch.
    """

    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        assert self.running_mean is not None
        self.register_buffer("sum", torch.zeros_like(self.running_mean))
        self.register_buffer("sum_squares", torch.zeros_like(self.running_mean))
        self.chunks = chunks
        self.counter = 0
        self.tracked = 0

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions; channels are second."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._normalised(input, self.running_mean, self.running_var, training=False)
        if not is_recomputing():  # or checkpointed micro-batches would count twice
            self._track(input.detach())
            if self.tracked >= self.chunks:
                self.commit()
        # By the micro-batch's own statistics; the running ones change only in `commit`.
        return self._normalised(input, None, None, training=True)

    def _normalised(
        self, input: Tensor, mean: Tensor | None, variance: Tensor | None, *, training: bool
    ) -> Tensor:
        return F.batch_norm(
            input, mean, variance, self.weight, self.bias, training, momentum=0.0, eps=self.eps
        )

    @torch.no_grad()
    def _track(self, input: Tensor) -> None:
        others = [dim for dim in range(input.dim()) if dim != 1]
        # Sums, not means, since micro-batches may differ in size.
        self.sum += input.sum(others)
        self.sum_squares += input.square().sum(others)
        self.counter += input.numel() // input.size(1)
        self.tracked += 1

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics with the tracked batch, and start a new one."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean = self.sum / self.counter
        variance = self.sum_squares / self.counter - mean.square()
        self.running_mean.mul_(1 - share).add_(mean, alpha=share)
        self.running_var.mul_(1 - share).add_(variance, alpha=share)
        self.discard()

    @torch.no_grad()
    def discard(self) -> None:
        """Drop the tracked micro-batches."""
        self.sum.zero_()
        self.sum_squares.zero_()
        self.counter = 0
        self.tracked = 0

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> Any:
        """Replace every batch normalisation that has running statistics.

        Args:
            module: Module changed in place; parameters and statistics of the layers are kept.
            chunks: Micro-batches per batch.

        Returns:
            The module, or its replacement if it is itself a batch normalisation.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            return cls._from(module, chunks)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return module

    @classmethod
    def _from(cls, module: _BatchNorm, chunks: int) -> DeferredBatchNorm:
        made = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
        if module.affine:
            made.weight, made.bias = module.weight, module.bias
        assert module.running_mean is not None
        made.running_mean = module.running_mean
        made.running_var = module.running_var
        made.num_batches_tracked = module.num_batches_tracked
        # On the layer's device and in its dtype, unlike the buffers that the constructor made.
        made.sum = torch.zeros_like(module.running_mean)
        made.sum_squares = torch.zeros_like(module.running_mean)
        return made.train(module.training)


@contextmanager
def whole_batches(module: nn.Module) -> Iterator[None]:
    """End the batch of all deferred layers with the block.

    This includes layers that saw fewer micro-batches than expected; a batch that failed is
    dropped.
    """
    layers = [part for part in module.modules() if isinstance(part, DeferredBatchNorm)]
    try:
        yield
    except BaseException:
        for layer in layers:
            layer.discard()
        raise
    for layer in layers:
        if layer.training and layer.tracked:
            layer.commit()
