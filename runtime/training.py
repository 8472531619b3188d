"""What a training loop does between steps of a pipeline, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..capture.capture import default_device
from ..core.errors import InvalidInput
from .distributed import DistributedPipeline
from .engine.batch_io import LossFunction, as_scalar_loss
from .engine.padding import check_evaluation_mode, count_samples, pad_samples, trim_padding
from .engine.stage import autocast_to
from .pipeline import Pipeline
from .replicas.clip_grad import clipping_factor, scale_gradients, sum_of_squares
from .replicas.grad_scaler import LossScale


class Training:
    """A pipeline with what a training loop needs: accumulation, clipping and loss scaling.

    ::

        with Training(pipeline, max_norm=1.0) as training:
            optimizer = training.optimizer(torch.optim.AdamW)
            for batch, target in data:
                loss = training.step(batch, target=target)
                if training.update(optimizer):
                    scheduler.step()

    Every rank does the same; what `update` decides, it decides on all of them together.

    Args:
        pipeline: A `DistributedPipeline`, or a `Pipeline` in one process.
        loss_fn: For a `Pipeline`: ``loss_fn(output, target)``, a mean over the batch.
        autocast: For a `Pipeline`: the dtype that stages and loss are cast to.
        max_norm: Gradients are scaled down to at most this norm over the whole model.
        accumulate: So many steps make one update of the weights, by the mean of their gradients.
        loss_scale: Multiplies gradients on their way back, and is taken out before the update; an
            update whose gradients overflowed is left out. ``auto`` uses one under autocast to
            float16.

    Attributes:
        pipeline: As given; what `save_checkpoint` takes.
        loss_scale: `None` where there is none.
        norm: Of the gradients before they were clipped, as of the last update; `None` if it was
            not needed.
        skipped: Updates left out because gradients overflowed.

    Raises:
        InvalidInput: An argument is not what it may be.
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
    ) -> None:
        if accumulate < 1 or (max_norm is not None and not max_norm > 0):
            raise InvalidInput(
                f"accumulate is {accumulate} and max_norm {max_norm}; give at least one step and a "
                "norm above 0"
            )
        self.pipeline = pipeline
        self._runner = _runner(pipeline, loss_fn, autocast)
        self._max_norm, self._accumulate = max_norm, accumulate
        if loss_scale == "auto":
            loss_scale = LossScale() if self._runner.autocast is torch.float16 else None
        self.loss_scale = loss_scale
        self.norm: float | None = None
        self.skipped = 0
        self._steps = 0

    @property
    def module(self) -> nn.Module:
        """This rank's parameters and buffers, under the model's own names."""
        return self._runner.module

    def optimizer(self, kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
        """An optimizer of this rank's parameters, also where it has none.

        For example ``training.optimizer(torch.optim.AdamW, lr=1e-3)``.
        """
        return kind([{"params": list(self.parameters())}], **options)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's; none where its stage has none, which torch's optimizers refuse."""
        return self._runner.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's with the model's own names, for an optimizer with several groups."""
        return self._runner.module.named_parameters()

    def step(self, *args: Tensor, target: Any = None, **kwargs: Tensor) -> Tensor | None:
        """Forward and backward of one batch; see `DistributedPipeline.step`.

        Returns:
            The batch's mean loss where the last stage is, `None` elsewhere.

        Raises:
            InvalidInput: Enough steps were taken for an update, and there was none.
        """
        if self._steps == self._accumulate:
            raise InvalidInput(
                f"{self._steps} steps were taken without an update; call update(optimizer) after "
                "every step, or build with a larger accumulate="
            )
        scale = (self.loss_scale.value if self.loss_scale else 1.0) / self._accumulate
        if self._steps + 1 < self._accumulate:
            with self._runner.no_sync():
                loss = self._runner.step(*args, target=target, loss_scale=scale, **kwargs)
        else:
            loss = self._runner.step(*args, target=target, loss_scale=scale, **kwargs)
        self._steps += 1
        return loss

    def update(self, *optimizers: Optimizer) -> bool:
        """Move the weights, if enough steps were taken; called after every step, on every rank.

        Returns:
            Whether they were moved, the same on all ranks: not while gradients are accumulated, nor
            when a gradient overflowed on any rank. Schedulers step where it is true.

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
        """See `DistributedPipeline.evaluate`."""
        return self._runner.evaluate(*args, target=target, pad=pad, **kwargs)

    def train(self, mode: bool = True) -> None:
        """Switch training or evaluation mode."""
        self._runner.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """What goes on from step to step, as JSON, for the ``extra`` of `save_checkpoint`."""
        return {"loss_scale": self.loss_scale.state_dict() if self.loss_scale else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        """Part from the other ranks; call it before destroying the process group."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(self.pipeline, DistributedPipeline):
            self.pipeline.__exit__(kind, error, traceback)

    def _scale_gradients(self) -> bool:
        """Take the loss scale out, and clip; false if that cannot be done."""
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
        clips = 1.0 if self._max_norm is None else clipping_factor(self.norm, self._max_norm)
        if clips / scale != 1:
            self._runner.scale_gradients(clips / scale)
        return True


def _runner(
    pipeline: DistributedPipeline | Pipeline,
    loss_fn: LossFunction | None,
    autocast: torch.dtype | None,
) -> DistributedPipeline | LocalRunner:
    if isinstance(pipeline, Pipeline):
        if loss_fn is None:
            raise InvalidInput("a Pipeline has no loss of its own; give loss_fn=")
        return LocalRunner(pipeline, loss_fn, autocast)
    if loss_fn is not None or autocast is not None:
        raise InvalidInput(
            "a DistributedPipeline has its own loss_fn and autocast; give them to it"
        )
    return pipeline


class LocalRunner:
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
        samples = count_samples((args, kwargs))
        size = self.pipeline.microbatch_size
        if not pad or not size or not samples:
            with torch.no_grad():
                return self._run(args, kwargs, target)
        check_evaluation_mode(self.pipeline)
        whole = -(-samples // size) * size
        args, kwargs = pad_samples((args, kwargs), whole)
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
        with autocast_to(self.device, self.autocast):
            output = self.pipeline(*self._here(args), **self._here(kwargs))
            if filled_from is not None:
                output = trim_padding(output, *filled_from)
            if target is None:
                return output, None
            where = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
            return output, as_scalar_loss(self._loss_fn(output, _to(target, where.device)))

    def _here(self, values: Any) -> Any:
        return _to(values, self.device)


def _to(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
