"""Reduction of the losses of micro-batches to that of the batch, tried on the first one.

For any other loss than a mean or a sum over samples, gradients would not be the unsplit model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ...capture.observation.nested_values import list_tensors, map_tensors
from ...core.errors import InvalidInput
from ..random_state import preserve_random_state

LossReduction = Literal["mean", "sum", "microbatch"]
"""``mean`` and ``sum`` are over samples, and refused for a loss that is neither; ``microbatch``
takes the mean over micro-batches, whatever the loss is of each."""

Compute = Callable[[list[Any], Any], Tensor]


class ReductionCheck:
    """Comparison of a loss of some samples with its values on two parts of them, once."""

    def __init__(self, reduction: LossReduction, device: torch.device) -> None:
        if reduction not in ("mean", "sum", "microbatch"):
            raise InvalidInput(
                f"loss_reduction is {reduction!r}; use 'mean', 'sum' or 'microbatch'"
            )
        self._reduction, self._device = reduction, device
        self._is_done = reduction == "microbatch"
        self._first: tuple[list[Any], Any] | None = None

    @torch.no_grad()
    def look(self, compute: Compute, outputs: list[Any], target: Any) -> None:
        """Look at a micro-batch; of a single sample, at two of them together."""
        if self._is_done or not all(map(_is_plain, list_tensors((outputs, target)))):
            return
        values = map_tensors(lambda tensor: tensor.detach().clone(), (outputs, target))
        sizes = {len(tensor) for tensor in list_tensors(values) if tensor.dim()}
        size = min(sizes, default=0)
        if sizes == {1} and self._first is None:
            self._first = values
            return
        self._is_done = True
        if len(sizes) != 1 or not size:
            return
        ends = (0, size // 2, size)
        parts = [_rows(values, ends[at], ends[at + 1]) for at in (0, 1)] if size > 1 else []
        with preserve_random_state(self._device):
            self._compare(compute, parts or [self._first, values], size // 2 / size or 0.5)

    def _compare(self, compute: Compute, parts: list[Any], share: float) -> None:
        """Compare two parts, of which the first has so large a ``share`` of samples."""
        try:
            whole = _join(*parts)
            losses = [compute(*given) for given in (whole, whole, *parts)]
            found, again, first, second = torch.stack(losses).tolist()  # the device's only wait
        except Exception:  # noqa: BLE001 (it takes no other numbers of samples)
            return
        if found != again:
            return  # it draws random numbers
        wanted, other = share * first + (1 - share) * second, first + second
        wanted, other = (wanted, other) if self._reduction == "mean" else (other, wanted)
        allowed = (1e-3 if losses[0].itemsize > 2 else 2e-2) * max(map(abs, (found, first, second)))
        if abs(found - wanted) <= allowed:
            return
        remedy = (
            "use a Pipeline in one process, whose loss sees the whole batch, or pass "
            "loss_reduction='microbatch' for the mean over micro-batches"
        )
        if abs(found - other) <= allowed:
            remedy = f"pass loss_reduction={'sum' if self._reduction == 'mean' else 'mean'!r}"
        raise InvalidInput(
            f"loss_fn is {found:.4g} for two parts of a batch together and {first:.4g} and "
            f"{second:.4g} for each, so it is no {self._reduction} over samples. Ranks compute it "
            f"by micro-batch, and gradients would be others than the unsplit model's; {remedy}"
        )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _rows(values: Any, begin: int, end: int) -> Any:
    return map_tensors(lambda each: each[begin:end].clone() if each.dim() else each, values)


def _join(first: Any, second: Any) -> Any:
    others = iter(list_tensors(second))

    def join(tensor: Tensor) -> Tensor:
        other = next(others)
        return torch.cat([tensor, other]) if tensor.dim() else (tensor + other) / 2

    return map_tensors(join, first)
