"""Sum gradients over the ranks that hold the same weights: replicas, and stages with tied ones.

Gradients are summed in buckets. A bucket leaves when the last backward of every stage that uses
its weights here has been through them, so most of the time that summing takes is hidden behind the
rest of that backward and other stages' work. All ranks of a group send their buckets in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""As large as DistributedDataParallel's: large enough for a link, small enough to leave early."""


@dataclass(frozen=True)
class SharedWeight:
    """A trainable weight that several ranks hold.

    Attributes:
        name: For errors.
        tensor: The parameter.
        stages: The stages that use it.
        ranks: All ranks that hold it, ascending.
    """

    name: str
    tensor: Tensor
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass
class _Bucket:
    """Weights that are summed together.

    Attributes:
        weights: Of one dtype and one set of ranks.
        group: Those ranks.
        incomplete: The weights whose gradients are still added to.
        under_way: The message, and what to wait for, once it has left.
    """

    weights: list[SharedWeight]
    group: dist.ProcessGroup
    incomplete: set[int] = field(default_factory=set)
    under_way: tuple[Tensor, Any] | None = None


class GradientSum:
    """Sums the gradients of one rank's shared weights.

    Args:
        weights: Those this rank holds; all ranks that hold one have it after the same others of
            its set of ranks.
        groups: For each set of ranks its process group.
        stages_here: The stages this rank runs.
    """

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        stages_here: Iterable[int],
    ) -> None:
        here = set(stages_here)
        self._weights = list(weights)
        self._stages = {id(weight.tensor): here.intersection(weight.stages) for weight in weights}
        self._buckets = [
            _Bucket(part, groups[part[0].ranks]) for part in _in_buckets(self._weights)
        ]
        self._waiting: dict[int, set[int]] = {}
        self._at_last: int | None = None
        self._is_summed = True
        for weight in weights:
            weight.tensor.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self, *, sums: bool = True) -> None:
        """A step begins; if it ``sums``, its gradients are summed when it ends.

        What is in ``.grad`` already, if a step before summed it, is on every rank: each keeps its
        share of it, so that it is not counted again. To keep it apart would take a second
        gradient's memory.
        """
        if self._is_summed:
            for weight in self._weights:
                if weight.tensor.grad is not None:
                    weight.tensor.grad /= len(weight.ranks)
            self._is_summed = False
        if not sums:
            return
        self._waiting = {key: set(stages) for key, stages in self._stages.items()}
        for bucket in self._buckets:
            bucket.incomplete = {id(weight.tensor) for weight in bucket.weights}
            bucket.under_way = None

    def last_backward_begins(self, stage: int) -> None:
        """No backward of this stage comes after the one that begins now."""
        self._at_last = stage

    def last_backward_ended(self, stage: int) -> None:
        """Nothing adds to the gradients of this stage any more."""
        self._at_last = None
        for stages in self._waiting.values():
            stages.discard(stage)
        complete = {key for key, stages in self._waiting.items() if not stages}
        for bucket in self._buckets:
            bucket.incomplete -= complete
        self._send_complete()

    def finish(self) -> None:
        """Wait for all sums, and put them where gradients are."""
        for bucket in self._buckets:
            assert bucket.under_way is not None, "a stage had no last backward"
            message, work = bucket.under_way
            work.wait()
            bucket.under_way = None
            parts = message.split([weight.tensor.numel() for weight in bucket.weights])
            for weight, part in zip(bucket.weights, parts, strict=True):
                assert weight.tensor.grad is not None
                weight.tensor.grad.copy_(part.view_as(weight.tensor.grad))
        self._is_summed = True

    def _accumulated(self, tensor: Tensor) -> None:
        """A gradient was added to; the last time, its bucket may be complete."""
        if self._at_last is None or self._waiting.get(id(tensor)) != {self._at_last}:
            return
        for bucket in self._buckets:
            bucket.incomplete.discard(id(tensor))
        self._send_complete()

    def _send_complete(self) -> None:
        """Send what is complete; of one group's buckets none before those in front of it."""
        held_up: set[dist.ProcessGroup] = set()
        for bucket in self._buckets:
            if bucket.incomplete:
                held_up.add(bucket.group)
            elif bucket.under_way is None and bucket.group not in held_up:
                message = torch.cat([_gradient(weight.tensor) for weight in bucket.weights])
                work = dist.all_reduce(message, group=bucket.group, async_op=True)
                bucket.under_way = (message, work)


def _gradient(tensor: Tensor) -> Tensor:
    """A weight's gradient as one row; zeros where no micro-batch here gave it one."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad.detach().reshape(-1)


def _in_buckets(weights: Sequence[SharedWeight]) -> Iterator[list[SharedWeight]]:
    """Parts of one set of ranks and one dtype, in the given order, up to `BUCKET_BYTES` each."""
    kinds: dict[tuple[Any, ...], list[SharedWeight]] = {}
    for weight in weights:
        kinds.setdefault((weight.ranks, weight.tensor.dtype), []).append(weight)
    for same in kinds.values():
        part: list[SharedWeight] = []
        size = 0
        for weight in same:
            if part and size + weight.tensor.nbytes > BUCKET_BYTES:
                yield part
                part, size = [], 0
            part.append(weight)
            size += weight.tensor.nbytes
        yield part
