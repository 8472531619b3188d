"""Training loop support: accumulation, gradient clipping and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.capture import default_device
from ..capture.observation.nested_values import list_tensors, map_tensors
from ..core.errors import InvalidInput, NonFinite
from ..core.models.training_memory import Recipe
from .distributed import DistributedPipeline
from .engine.batch_io import (
    LossFunction,
    as_scalar_loss,
    check_gradients_enabled,
    check_loss_function,
)
from .engine.loss_graph import LossGraphCheck
from .engine.padding import check_evaluation_mode, count_samples, pad_samples, trim_padding
from .engine.stage import autocast_to
from .optimizer import Groups, make_optimizer
from .pipeline import Pipeline
from .recipe import scales_loss, widen_gradients
from .replicas.clip_grad import clipping_factor, scale_gradients, sum_of_squares
from .replicas.grad_scaler import LossScale


class Training:
    """A pipeline with gradient accumulation, clipping and loss scaling.

    ::

        with Training(pipeline, max_norm=1.0) as training:
            optimizer = training.optimizer(torch.optim.AdamW)
            for batch, target in data:
                loss = training.step(batch, target=target)
                if training.update(optimizer):
                    scheduler.step()

    Every rank runs this loop, and `update` returns the same decision on all of them.

    Args:
        pipeline: A `DistributedPipeline`, or a `Pipeline` in one process.
        loss_fn: For a `Pipeline`: ``loss_fn(output, target)``, a mean over the batch.
        autocast: For a `Pipeline`: the dtype that stages and loss are cast to.
        max_norm: Clip gradients to at most this norm over the whole model.
        accumulate: Steps per update of the weights, which uses the mean of their gradients.
        loss_scale: Factor on gradients during the backward, removed before the update; an update
            with overflowed gradients is skipped. ``auto`` uses one under autocast to float16, and
            with recipes of float16.
        recipe: Recipe of precision that the model was converted for (`build` does that): in which
            type gradients are summed, and whether `optimizer` keeps master weights.

    Attributes:
        pipeline: As given; pass it to `save_checkpoint`.
        loss_scale: The loss scale; `None` if there is none.
        norm: The gradients' norm before clipping at the last update; `None` if it was not needed.
        skipped: Number of updates skipped because gradients overflowed.

    Raises:
        InvalidInput: An argument is invalid.
    """

    def __init__(
        self,
        pipeline: DistributedPipeline | Pipeline,
        *,
        loss_fn: LossFunction | None = None,
        autocast: torch.dtype | None = None,
        max_norm: float | None = None,
        accumulate: int = 1,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        recipe: Recipe | None = None,
    ) -> None:
        if accumulate < 1 or (max_norm is not None and not max_norm > 0):
            raise InvalidInput(
                f"accumulate is {accumulate} and max_norm {max_norm}; use at least one step and a "
                "norm above 0"
            )
        self.pipeline = pipeline
        self._runner = _make_runner(pipeline, loss_fn, autocast)
        self._max_norm, self._accumulate = max_norm, accumulate
        self.recipe = recipe
        widen_gradients(self._runner.module, recipe)
        if loss_scale == "auto":
            is_needed = self._runner.autocast is torch.float16 or scales_loss(recipe)
            loss_scale = LossScale() if is_needed else None
        self.loss_scale = loss_scale
        if loss_scale is not None:  # overflows are then skipped by `update`
            self._runner.check_finite = False
        self.norm: float | None = None
        self.skipped = 0
        self._steps = 0

    @property
    def module(self) -> nn.Module:
        """Return this rank's parameters and buffers, under the model's names."""
        return self._runner.module

    def optimizer(
        self, kind: Callable[..., Optimizer], groups: Groups | None = None, **options: Any
    ) -> Optimizer:
        """Create an optimizer of this rank's parameters, of which there may be none.

        For example ``training.optimizer(torch.optim.AdamW, lr=1e-3)``; see
        `DistributedPipeline.optimizer`.
        """
        if isinstance(self.pipeline, DistributedPipeline):
            return self.pipeline.optimizer(kind, groups, recipe=self.recipe, **options)
        weights = dict(self.named_parameters())
        return make_optimizer(kind, weights, groups, options, names=weights, recipe=self.recipe)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, of which there may be none; see `optimizer`."""
        return self._runner.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with the model's names, for optimizers with groups."""
        return self._runner.module.named_parameters()

    def step(self, *args: Tensor, target: Any = None, **kwargs: Tensor) -> Tensor | None:
        """Run forward and backward of one batch; see `DistributedPipeline.step`.

        Returns:
            The batch's mean loss on ranks of the last stage, `None` elsewhere.

        Raises:
            InvalidInput: `update` was not called after enough steps for an update.
        """
        if self._steps == self._accumulate:
            raise InvalidInput(
                f"{self._steps} steps were taken without an update; call update(optimizer) after "
                "every step, or build with a larger accumulate="
            )
        # A step's gradients are those of the mean over its batch; dividing by the number of steps
        # makes their sum the mean over all of them.
        scale = (self.loss_scale.value if self.loss_scale else 1.0) / self._accumulate
        if self._steps + 1 < self._accumulate:
            with self._runner.no_sync():
                loss = self._runner.step(*args, target=target, loss_scale=scale, **kwargs)
        else:
            loss = self._runner.step(*args, target=target, loss_scale=scale, **kwargs)
        self._steps += 1
        return loss

    def update(self, *optimizers: Optimizer) -> bool:
        """Update the weights if enough steps were taken; called after every step, on every rank.

        Returns:
            Whether weights were updated, equal on all ranks: false while gradients accumulate, or
            if a gradient overflowed on any rank. Step learning-rate schedulers where it is true.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        if self._steps < self._accumulate:
            return False
        self._steps = 0
        is_sound = self._scale_gradients()
        for optimizer in optimizers:
            if is_sound:
                optimizer.step()
            optimizer.zero_grad()
        return is_sound

    def evaluate(
        self, *args: Tensor, target: Any = None, pad: bool = False, **kwargs: Tensor
    ) -> tuple[Any, Tensor | None]:
        """Run the forwards of one batch; see `DistributedPipeline.evaluate`."""
        return self._runner.evaluate(*args, target=target, pad=pad, **kwargs)

    def train(self, mode: bool = True) -> None:
        """Switch training or evaluation mode."""
        self.pipeline.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, as JSON, for the ``extra`` of `save_checkpoint`."""
        return {"loss_scale": self.loss_scale.state_dict() if self.loss_scale else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        """Close the pipeline; call it before destroying the process group."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(self.pipeline, DistributedPipeline):
            self.pipeline.__exit__(kind, error, traceback)

    def _scale_gradients(self) -> bool:
        """Remove the loss scale and clip gradients; return False if they overflowed."""
        if self.loss_scale is None and self._max_norm is None:
            return True
        scale = self.loss_scale.value if self.loss_scale else 1.0
        self.norm = float(self._runner.gradient_norm()) / scale
        if self.loss_scale is not None:
            overflowed = not math.isfinite(self.norm)
            self.loss_scale.update(overflowed=overflowed)
            if overflowed:
                self.skipped += 1
                return False
        # Unscaling and clipping in a single pass over the gradients.
        factor = 1.0 if self._max_norm is None else clipping_factor(self.norm, self._max_norm)
        if factor / scale != 1:
            scale_gradients(self.parameters(), factor / scale)
        return True


def _make_runner(
    pipeline: DistributedPipeline | Pipeline,
    loss_fn: LossFunction | None,
    autocast: torch.dtype | None,
) -> DistributedPipeline | LocalRunner:
    if isinstance(pipeline, Pipeline):
        if loss_fn is None:
            raise InvalidInput("a Pipeline has no loss function; pass loss_fn=")
        check_loss_function(loss_fn, pipeline)
        return LocalRunner(pipeline, loss_fn, autocast)
    if loss_fn is not None or autocast is not None:
        raise InvalidInput(
            "a DistributedPipeline has its own loss_fn and autocast; pass them to it instead"
        )
    return pipeline


class LocalRunner:
    """The methods of `DistributedPipeline` that `Training` needs, for a `Pipeline`."""

    def __init__(
        self, pipeline: Pipeline, loss_fn: LossFunction, autocast: torch.dtype | None = None
    ) -> None:
        self.module = pipeline
        self.device = default_device(pipeline)
        self._loss_fn, self.autocast = loss_fn, autocast
        self._check = LossGraphCheck(pipeline, pipeline)
        self.check_finite = True

    def step(
        self, *args: Tensor, target: Any = None, loss_scale: float = 1.0, **kwargs: Tensor
    ) -> Tensor:
        """Run forward and backward of one batch; see `DistributedPipeline.step`."""
        if target is None:
            raise InvalidInput("a training step needs target=")
        check_gradients_enabled()
        _, loss = self._run(args, kwargs, target)
        assert loss is not None
        loss = loss + self.module.aux_loss.to(loss.device)
        value = float(loss.detach())
        if self.check_finite and loss_scale <= 1 and not math.isfinite(value):
            raise NonFinite(f"the loss is {value}; correct the data or lower the learning rate")
        (loss * loss_scale).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(
        self, *args: Tensor, target: Any = None, pad: bool = False, **kwargs: Tensor
    ) -> tuple[Any, Tensor | None]:
        """Run the forward of one batch; see `DistributedPipeline.evaluate`."""
        samples, size = count_samples((args, kwargs)), self.module.microbatch_size
        if not pad or not size or not samples:
            return self._run(args, kwargs, target)
        check_evaluation_mode(self.module)
        whole = -(-samples // size) * size
        args, kwargs = pad_samples((args, kwargs), whole)
        return self._run(args, kwargs, target, (whole, samples))

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a null context: there are no other ranks."""
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        """Return the gradients' norm; see `DistributedPipeline.gradient_norm`."""
        return sum_of_squares(self.module.parameters(), {}, self.device, sums_shards=True).sqrt()

    def _run(
        self,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        target: Any,
        filled_from: tuple[int, int] | None = None,
    ) -> tuple[Any, Tensor | None]:
        with autocast_to(self.device, self.autocast):
            output = self.module(*_to(args, self.device), **_to(kwargs, self.device))
            if filled_from is not None:
                output = trim_padding(output, *filled_from)
            if target is None:
                return output, None
            where = list_tensors(output)[0].device
            there = _to(target, where)
            return output, self._check.run(
                lambda: as_scalar_loss(self._loss_fn(output, there)), list_tensors(output)
            )


def _to(values: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), values)
