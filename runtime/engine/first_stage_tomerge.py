"""A batch on its way in: checked, and split into the micro-batches of the first stage."""

from __future__ import annotations

import torch
from torch import Tensor

from ...capture.sample import CallStructure, dtype_name
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.units import count
from .microbatch import split_batch


class FirstStage:
    """Makes micro-batches of what a model is called with.

    Args:
        plan: Their number and shapes.
        structure: How the model is called.
        device: Where they are used.
    """

    def __init__(self, plan: Plan, structure: CallStructure, device: torch.device) -> None:
        self._plan, self._structure, self._device = plan, structure, device

    @property
    def microbatch_size(self) -> int:
        """Samples of a micro-batch."""
        return self._plan.inputs[0].shape[0]

    @property
    def size(self) -> int:
        """Samples of a batch."""
        return self.microbatch_size * self._plan.num_microbatches

    def microbatches(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """The flat inputs of every micro-batch, on the device.

        Raises:
            InvalidInput: The batch is not the plan's micro-batches.
        """
        if len(args) == len(self._structure.names) + 1 and not kwargs:
            raise InvalidInput(
                f"this model takes {count(len(args) - 1, 'input')} "
                f"({', '.join(self._structure.names)}), and got {len(args)}; give the target by "
                "name: target="
            )
        flat = self._structure.flatten(args, kwargs)
        self._check(flat)
        batches = split_batch(
            flat, self._plan.num_microbatches, self.microbatch_size, self._structure.names
        )
        if self._device.type == "cpu":
            return batches
        return [
            tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
            for batch in batches
        ]

    def _check(self, flat: tuple[Tensor, ...]) -> None:
        for spec, tensor in zip(self._plan.inputs, flat, strict=True):
            wanted = (spec.shape[0] * self._plan.num_microbatches, *spec.shape[1:])
            if tuple(tensor.shape) != wanted:
                raise InvalidInput(
                    f"input {spec.name!r} has shape {tuple(tensor.shape)}; this plan's batch is "
                    f"{wanted}: {self._plan.num_microbatches} micro-batches of {spec.shape[0]}"
                    f"{_about_the_last(tuple(tensor.shape), wanted)}"
                )
            dtype = getattr(torch, spec.dtype)
            if tensor.dtype != dtype and (tensor.is_floating_point() or dtype.is_floating_point):
                raise InvalidInput(
                    f"input {spec.name!r} is {dtype_name(tensor.dtype)}; this plan's is "
                    f"{spec.dtype}: convert it, or profile and plan the model as you call it"
                )


def _about_the_last(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What to do with a batch that only has fewer samples, as the last of a data set may have."""
    if not found or not 0 < found[0] < wanted[0] or found[1:] != wanted[1:]:
        return ""
    return (
        ". If it is the last one of the data: leave it out (drop_last=True), or in an evaluation "
        "fill it up, evaluate(..., pad=True)"
    )
