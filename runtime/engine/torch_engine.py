"""The one place that touches ``torch.distributed.pipelining``.

Our stages pass through it with static metadata, so that it never runs a module on made-up data;
our `core.schedule.Schedule` says the order it is expected to work in, and tests hold it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...core.graph.graph import Boundary
from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import Plan
from ..ranks.failure_detection import Watch
from ..replicas.gradient_sync import GradientSum
from .stage import casting

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

LossOfFlat = Callable[[Any, Tensor], Tensor]


class TorchEngine:
    """One rank's stage under one of torch's schedules.

    Args:
        module: Flat tensors in, a tuple of tensors out.
        index: This stage.
        plan: For the schedule, the micro-batches and the shapes.
        boundaries: What crosses each cut.
        outputs: Shapes of the last stage's outputs.
        loss: Takes the last stage's flat outputs and a target, and returns this micro-batch's
            share of the loss.
        device: Where the stage is.
        group: The ranks, in stage order.
        gradient_sum: Of tied weights; `None` if there are none.
        watch: Told what the rank is doing.
        autocast: The dtype that module and loss are cast to; `None` for none.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        plan: Plan,
        boundaries: Sequence[Boundary],
        outputs: Sequence[TensorSpec],
        loss: LossOfFlat,
        device: torch.device,
        group: dist.ProcessGroup | None,
        gradient_sum: GradientSum | None,
        watch: Watch,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._index, self._gradient_sum = index, gradient_sum
        last = index == plan.num_stages - 1
        received = plan.inputs if index == 0 else boundaries[index - 1].tensors
        sent = outputs if last else boundaries[index].tensors
        self._stage = _WatchedStage(
            _TensorsOnly(module) if last else module,
            index,
            plan.num_stages,
            device,
            input_args=_metadata(received),
            output_args=_metadata(sent),
            group=group,
        )
        self._stage.watch, self._stage.autocast = watch, autocast
        self._last = last

        def cast_loss(flat: Any, target: Tensor) -> Tensor:
            with casting(device, autocast):
                return loss(flat, target)

        self._schedule = SCHEDULES[plan.schedule](
            self._stage, n_microbatches=plan.num_microbatches, loss_fn=cast_loss, scale_grads=False
        )

    def train(self, inputs: Sequence[Sequence[Tensor]], target: Any) -> Tensor | None:
        """One training step; the last stage returns the loss.

        Args:
            inputs: Of each micro-batch; read where the first stage is.
            target: The whole batch's; read where the last stage is.
        """
        if self._gradient_sum is not None:
            self._gradient_sum.begin()
        loss = self._step(tuple(torch.cat(column) for column in zip(*inputs, strict=True)), target)
        if self._gradient_sum is not None:
            self._gradient_sum.last_backward_ended(self._index)
            self._gradient_sum.finish()
        return loss

    def _step(self, flat: Sequence[Tensor], target: Any) -> Tensor | None:
        losses: list[Tensor] | None = [] if self._last else None
        self._schedule.step(
            *(flat if self._stage.is_first else ()),
            target=target if self._last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None


class _TensorsOnly(nn.Module):
    """A last stage without the constants among its outputs, which torch would try to send."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(value for value in self.module(*inputs) if isinstance(value, Tensor))


class _WatchedStage(PipelineStage):
    """Says what it is doing, so that an error can."""

    watch: Watch
    autocast: torch.dtype | None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.watch.says(f"the forward of micro-batch {fwd_chunk_id} on stage {self.stage_index}")
        with casting(self.device, self.autocast):
            result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.watch.says(f"what follows {self.watch.doing}")
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.watch.says(f"the backward of micro-batch {bwd_chunk_id} on stage {self.stage_index}")
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.watch.says(f"what follows {self.watch.doing}")
        return result


def _metadata(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Tensors without memory that carry shape, dtype and whether a gradient comes back."""
    return tuple(
        torch.empty(
            spec.shape,
            dtype=getattr(torch, spec.dtype),
            device="meta",
            requires_grad=spec.requires_grad,
        )
        for spec in specs
    )
