"""Steps of a pipeline in one process, as `DistributedPipeline` takes them in several."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture.capture import default_device
from ..core.errors import InvalidInput
from .engine.batch_io import LossFunction, one_number
from .engine.casting_tomerge import casting
from .engine.padding import check_evaluates, cut_off, filled, num_samples
from .pipeline import Pipeline
from .replicas.clip_grad import scale_gradients, sum_of_squares


class OneProcess:
    """Takes training steps with a `Pipeline`.

    Args:
        pipeline: It has all stages.
        loss_fn: ``loss_fn(output, target)`` of the whole batch, a mean over its samples.
        autocast: Run the stages and the loss under ``torch.autocast`` to this dtype.
    """

    def __init__(
        self, pipeline: Pipeline, loss_fn: LossFunction, autocast: torch.dtype | None = None
    ) -> None:
        self.pipeline = pipeline
        self.device = default_device(pipeline)
        self._loss_fn, self.autocast = loss_fn, autocast

    @property
    def module(self) -> nn.Module:
        """All parameters and buffers."""
        return self.pipeline

    def step(
        self, *args: Tensor, target: Any = None, loss_scale: float = 1.0, **kwargs: Tensor
    ) -> Tensor:
        """See `DistributedPipeline.step`."""
        if target is None:
            raise InvalidInput("a training step needs target=")
        _, loss = self._run(args, kwargs, target)
        assert loss is not None
        (loss * loss_scale).backward()
        return loss.detach()

    def evaluate(
        self, *args: Tensor, target: Any = None, pad: bool = False, **kwargs: Tensor
    ) -> tuple[Any, Tensor | None]:
        """See `DistributedPipeline.evaluate`."""
        samples = num_samples((args, kwargs))
        size = self.pipeline.microbatch_size
        if not pad or not size or not samples:
            with torch.no_grad():
                return self._run(args, kwargs, target)
        check_evaluates(self.pipeline)
        whole = -(-samples // size) * size
        args, kwargs = filled((args, kwargs), whole)
        with torch.no_grad():
            return self._run(args, kwargs, target, (whole, samples))

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nobody to wait for."""
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        """See `DistributedPipeline.gradient_norm`."""
        return sum_of_squares(self.pipeline.parameters(), {}, self.device).sqrt()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients."""
        scale_gradients(self.pipeline.parameters(), factor)

    def train(self, mode: bool = True) -> None:
        """Switch the mode of all stages."""
        self.pipeline.train(mode)

    def close(self) -> None:
        """There is nobody to part from."""

    def _run(
        self,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        target: Any,
        filled_from: tuple[int, int] | None = None,
    ) -> tuple[Any, Tensor | None]:
        with casting(self.device, self.autocast):
            output = self.pipeline(*self._here(args), **self._here(kwargs))
            if filled_from is not None:
                output = cut_off(output, *filled_from)
            if target is None:
                return output, None
            where = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
            return output, one_number(self._loss_fn(output, _to(target, where.device)))

    def _here(self, values: Any) -> Any:
        return _to(values, self.device)


def _to(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
