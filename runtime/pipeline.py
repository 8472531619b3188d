"""A planned model in one process: stages on one or several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..capture.segment import Segment
from ..core.errors import InvalidInput
from ..core.plan import Plan
from .cut import CutModel, cut_for_plan
from .microbatch import join_outputs, split_batch
from .runnable import check_runnable


class Pipeline(nn.Module):
    """Runs a model stage by stage and micro-batch by micro-batch, in GPipe's clock order.

    It has the model's own parameters and buffers under the model's own names, is called like the
    model, and is differentiated like it: the backward pass runs through all stages. Given several
    devices, stage ``s`` lives on the ``s``-th; their work overlaps because it is queued in clock
    order (Huang et al. 2019, section 2.3). No schedule changes a result, so a plan of any
    runs in this order; `runtime.runnable` says which plans are refused.

    Args:
        model: The model the plan was made for. Its modules are used, not copied.
        plan: Where to cut, and into how many micro-batches to split a batch.
        devices: One device, or one for every stage; `None` leaves the model where it is.
        sample: See `runtime.cut.cut_for_plan`.

    Raises:
        PlanMismatch: The plan is for another model, or uses what this cannot run.
        InvalidInput: The number of devices is neither one nor the number of stages.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        devices: Sequence[torch.device | str] | None = None,
        sample: Any = None,
    ) -> None:
        super().__init__()
        spread = devices is not None and len(devices) > 1
        check_runnable(plan, "devices" if spread else "one device")
        pieces = cut_for_plan(model, plan, sample)
        object.__setattr__(self, "_pieces", pieces)
        self._num_microbatches = plan.num_microbatches
        fixed_size = pieces.captured.program.mode == "export"
        self._microbatch_size = plan.inputs[0].shape[0] if fixed_size and plan.inputs else None
        self._devices = _place(pieces, devices, model)
        self._share_names(model)
        self.training = model.training

    _pieces: CutModel

    def _share_names(self, model: nn.Module) -> None:
        """Hold the model's children, parameters and buffers under their own names."""
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            persistent = name not in model._non_persistent_buffers_set
            self.register_buffer(name, buffer, persistent=persistent)

    @property
    def stages(self) -> tuple[Segment, ...]:
        """The stages in order."""
        return self._pieces.stages

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run a batch.

        Returns:
            The model's own output for the whole batch: tensors concatenated over micro-batches
            along their first dimension, scalars averaged over samples.

        Raises:
            InvalidInput: The batch does not split into the plan's micro-batches, or an output's
                first dimension is not the micro-batch, so that it cannot be put together.
        """
        structure = self._pieces.structure
        flat = structure.flatten(args, kwargs)
        batches = split_batch(flat, self._num_microbatches, self._microbatch_size, structure.names)
        values: list[tuple[Any, ...]] = [tuple(batch) for batch in batches]
        for clock in range(len(values) + len(self.stages) - 1):
            for stage in reversed(range(len(self.stages))):
                if 0 <= (microbatch := clock - stage) < len(values):
                    values[microbatch] = self._run(stage, values[microbatch])
        sizes = [len(batch[0]) for batch in batches]
        return self._pieces.captured.unflatten_output(join_outputs(values, sizes))

    def _run(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        stage, device = self.stages[index], self._devices[index]
        if device is None:
            return tuple(stage(*inputs))
        moved = [
            value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for value in inputs
        ]
        elsewhere = {
            name: parameter.to(device)
            for name, parameter in stage.named_parameters()
            if parameter.device != device
        }
        if elsewhere:  # a tied weight lives with its first stage; gradients flow back to it
            result: tuple[Any, ...] = torch.func.functional_call(stage, elsewhere, tuple(moved))
            return result
        return tuple(stage(*moved))

    def train(self, mode: bool = True) -> Self:
        """Switch training or evaluation mode.

        Raises:
            PlanMismatch: The captured model has operations frozen in the other mode.
        """
        for stage in self._pieces.stages:
            stage.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for stage in self._pieces.stages:
            stage.apply_to_constants(fn)
            stage.share_buffers(self)
        return self


def _place(
    pieces: CutModel, devices: Sequence[torch.device | str] | None, model: nn.Module
) -> list[torch.device | None]:
    count = len(pieces.stages)
    if devices is None:
        return [None] * count
    if len(devices) not in (1, count):
        raise InvalidInput(f"give one device, or {count}: one for every stage; got {len(devices)}")
    placed = [torch.device(device) for device in devices] * (1 if len(devices) == count else count)
    for stage, device in reversed(list(zip(pieces.stages, placed, strict=True))):
        stage.to(device)  # last to first, so that a tied weight ends on its first stage's device
        stage.give_buffers(model)
    return list(placed)
