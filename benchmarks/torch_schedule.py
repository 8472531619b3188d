"""torch's own Schedule1F1B on the stages of a plan, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stagewright.capture.captured import Captured
from stagewright.capture.program.program import value_of
from stagewright.capture.sample import tensor_spec
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan
from stagewright.runtime.engine.batch_io import BatchOutputs, LossFunction
from stagewright.runtime.partition.cut import cut_for_plan


class TorchPipeline:
    """This rank's one of two stages under torch's schedule, driven as its documentation does.

    Args:
        rank: Also the number of the stage.
        device: Where the stage runs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFunction,
        rank: int,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        count, ranks = plan.num_microbatches, plan.num_stages
        pieces = cut_for_plan(model, plan, direct=False)
        # The loss of rank 0 is never asked for, but torch's schedule wants one.
        last = BatchOutputs(pieces.captured, loss_fn, count, device, pieces.stages[-1])
        cut = pieces.boundaries[0].tensors
        stage = PipelineStage(
            pieces.stages[rank],
            rank,
            ranks,
            device,
            input_args=_metadata(cut if rank else plan.inputs),
            output_args=_metadata(cut if rank == 0 else _output_specs(pieces.captured)),
        )
        self.module = pieces.stages[rank]
        self._is_first = rank == 0
        theirs = set(pieces.stages[1 - rank].parameters())
        self._tied = [weight for weight in pieces.stages[rank].parameters() if weight in theirs]
        self._schedule = Schedule1F1B(
            stage, count, loss_fn=last.compute_loss_share, scale_grads=False
        )

    def step(self, *batch: Tensor, target: Any) -> None:
        """Forward and backward of one batch."""
        if self._is_first:
            self._schedule.step(*batch)
        else:
            self._schedule.step(target=target, losses=[], return_outputs=False)
        for weight in self._tied:
            dist.all_reduce(weight.grad)


def _output_specs(captured: Captured) -> tuple[TensorSpec, ...]:
    return tuple(
        tensor_spec(node.name, value_of(node), requires_grad=value_of(node).is_floating_point())
        for node in captured.program.flat_outputs
        if isinstance(node, fx.Node)
    )


def _metadata(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(
            spec.shape, dtype=getattr(torch, spec.dtype), device="meta",
            requires_grad=spec.requires_grad,
        )
        for spec in specs
    )  # fmt: skip
