"""Synchronisation of gradients over ranks that hold the same weights: replicas and tied stages.

Gradients are summed in buckets. A bucket is sent once the last backward of every stage here that
uses its weights has reached them, so that most of the communication overlaps with the rest of that
backward and with other stages. All ranks of a group send their buckets in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ranks.collective import Collective, Pending

Item = TypeVar("Item")

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default: large enough for bandwidth, small enough to overlap."""


@dataclass(frozen=True)
class SharedWeight:
    """A weight of this rank, the stages that use it, and all ranks that hold it, ascending.

    With several ``copies`` as many of the ranks, this one among them, have equal gradients, which
    count once.
    """

    name: str
    tensor: Tensor
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    copies: int = 1


@dataclass
class _Bucket:
    """Weights whose gradients are summed in one message.

    Attributes:
        weights: Weights of one dtype and one set of ranks.
        ranks: These ranks.
        incomplete: Ids of weights whose gradients are not final yet.
        without: Positions of weights that no micro-batch here gave a gradient.
        under_way: The message and its operation, once it is sent.
    """

    weights: list[SharedWeight]
    ranks: Collective
    incomplete: set[int] = field(default_factory=set)
    without: list[int] = field(default_factory=list)
    under_way: tuple[Tensor, Pending] | None = None

    def send(self) -> None:
        """Begin to sum the gradients, followed by a one for each weight that has one here."""
        # Whether any rank has a gradient decides between a zero gradient and none, which weight
        # decay and optimizers with momentum tell apart. The ones travel in the same message.
        tensors = [weight.tensor for weight in self.weights]
        self.without = [at for at, tensor in enumerate(tensors) if tensor.grad is None]
        has_one = tensors[0].new_ones(len(tensors))
        for at in self.without:  # by a list, the host would wait for a copy of it
            has_one.narrow(0, at, 1).zero_()
        rows = [_row(weight.tensor, weight.copies) for weight in self.weights]
        message = torch.cat([*rows, has_one.detach()])
        del rows
        # Gradients move into the message: beside it they would take their memory twice.
        for tensor, part in zip(tensors, self._split(message), strict=False):
            if tensor.grad is not None and tensor.grad.is_contiguous():
                tensor.grad = part.view_as(tensor)
        self.under_way = (message, self.ranks.sum(message))

    def receive(self) -> None:
        """Store the sums as gradients; a weight without one on any rank stays without."""
        assert self.under_way is not None, "a stage had no last backward"
        message, work = self.under_way
        work.wait()
        self.under_way = None
        tensors = [weight.tensor for weight in self.weights]
        *parts, has_one = self._split(message)
        # Read only where this rank has no gradient: `tolist` makes the host wait for the GPU.
        somewhere = has_one.tolist() if self.without else []
        for at in self.without:
            if somewhere[at]:
                tensors[at].grad = torch.empty_like(tensors[at], dtype=message.dtype)
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor.grad is not None and tensor.grad.data_ptr() != part.data_ptr():
                tensor.grad.copy_(part.view_as(tensor.grad))

    def _split(self, message: Tensor) -> Sequence[Tensor]:
        """Return the gradients in a message, as rows, and the ones behind them."""
        sizes = [weight.tensor.numel() for weight in self.weights]
        rows: Sequence[Tensor] = message.split([*sizes, len(sizes)])
        return rows


class GradientSync:
    """Summation of the gradients of one rank's shared weights over their ranks.

    Weights may be frozen and unfrozen between steps, provided that all ranks that hold them do so.

    Weights of one set of ranks must be in the same order on all of them: buckets are matched by
    their order. To those that are ``repeated`` one backward may add several times.
    """

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        ranks: Mapping[tuple[int, ...], Collective],
        stages_here: Iterable[int],
        repeated: Iterable[Tensor] = (),
    ) -> None:
        here, self._repeated = set(stages_here), set(map(id, repeated))
        self._weights, self._ranks = list(weights), ranks
        self._stages = {id(weight.tensor): here.intersection(weight.stages) for weight in weights}
        self._trained: list[SharedWeight] = []
        self._buckets: list[_Bucket] = []
        self._hooked: set[int] = set()
        self._waiting: dict[int, set[int]] = {}
        self._at_last: int | None = None
        self._summed = {id(weight.tensor) for weight in weights}

    def begin(self, *, sums: bool = True) -> None:
        """Begin a step, at whose end gradients are summed if ``sums``.

        A gradient that an earlier step summed is in ``.grad`` of every rank. Each rank divides it
        by their number, so that the next sum counts it once. Keeping it aside instead would take
        the memory of a second gradient.
        """
        trained = [weight for weight in self._weights if weight.tensor.requires_grad]
        for weight in trained:
            if id(weight.tensor) in self._summed:
                self._summed.discard(id(weight.tensor))
                if weight.tensor.grad is not None:
                    weight.tensor.grad /= len(weight.ranks) / weight.copies
        if not sums:
            return
        # Buckets depend only on which weights are trained, so all ranks arrange them alike.
        if [id(w.tensor) for w in trained] != [id(w.tensor) for w in self._trained]:
            self._arrange(trained)
        self._waiting = {
            id(weight.tensor): set(self._stages[id(weight.tensor)]) for weight in trained
        }
        for bucket in self._buckets:
            bucket.incomplete = {id(weight.tensor) for weight in bucket.weights}
            bucket.under_way = None

    def last_backward_begins(self, stage: int) -> None:
        """Note that the backward about to begin is the stage's last one of the step."""
        self._at_last = stage

    def last_backward_ended(self, stage: int) -> None:
        """Send the buckets that are complete now that nothing adds to this stage's gradients."""
        self._at_last = None
        for stages in self._waiting.values():
            stages.discard(stage)
        complete = {key for key, stages in self._waiting.items() if not stages}
        for bucket in self._buckets:
            bucket.incomplete -= complete
        self._send_complete()

    def finish(self) -> None:
        """Wait for all sums and store them as gradients."""
        for bucket in self._buckets:
            bucket.receive()
        self._summed.update(id(weight.tensor) for weight in self._trained)

    def _arrange(self, trained: list[SharedWeight]) -> None:
        self._trained = trained
        self._buckets = [_Bucket(part, self._ranks[part[0].ranks]) for part in _in_buckets(trained)]
        for weight in trained:
            if id(weight.tensor) not in self._hooked:
                register_accumulation_hook(weight.tensor, self._accumulated)
                self._hooked.add(id(weight.tensor))

    def _accumulated(self, tensor: Tensor) -> None:
        """Send the bucket of a weight whose gradient is final, if it is complete.

        The gradient is final if the hook runs in the last backward of the only stage that can
        still add to it, and that adds once.
        """
        if id(tensor) in self._repeated:
            return
        if self._at_last is None or self._waiting.get(id(tensor)) != {self._at_last}:
            return
        for bucket in self._buckets:
            bucket.incomplete.discard(id(tensor))
        self._send_complete()

    def _send_complete(self) -> None:
        """Send complete buckets, but none before an earlier one of the same ranks.

        Backwards reach weights in an order that depends on the rank's micro-batches. Collectives
        of one group have no names: ranks that started them in different orders would add up
        gradients of different weights.
        """
        held_up: set[int] = set()
        for bucket in self._buckets:
            if bucket.incomplete:
                held_up.add(id(bucket.ranks))
            elif bucket.under_way is None and id(bucket.ranks) not in held_up:
                bucket.send()


def _row(tensor: Tensor, copies: int) -> Tensor:
    """Return a weight's gradient as one row; zeros where no micro-batch here gave it one."""
    if tensor.grad is None:
        return tensor.detach().new_zeros(tensor.numel())
    row = tensor.grad.detach().reshape(-1)
    return row if copies == 1 else row / copies


def _in_buckets(weights: Sequence[SharedWeight]) -> Iterator[list[SharedWeight]]:
    """Yield groups of weights of equal ranks and dtype, in order, of up to `BUCKET_BYTES`."""
    kinds: dict[tuple[Any, ...], list[SharedWeight]] = {}
    for weight in weights:
        kinds.setdefault((weight.ranks, weight.tensor.dtype), []).append(weight)
    for same in kinds.values():
        yield from split_by_size(same, lambda weight: weight.tensor.nbytes, BUCKET_BYTES)


def split_by_size(
    items: Iterable[Item], size_bytes: Callable[[Item], int], most_bytes: int
) -> Iterator[list[Item]]:
    """Yield consecutive items of up to ``most_bytes`` together, or single larger ones."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and total + size_bytes(item) > most_bytes:
            yield part
            part, total = [], 0
        part.append(item)
        total += size_bytes(item)
    if part:
        yield part


def register_accumulation_hook(weight: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call a method whenever autograd has added to a weight's gradient, while its object lives.

    The weight keeps its hooks in C++, where the garbage collector cannot see them. A hook that
    held the method's object, which holds the weight, would be a cycle that is never collected, and
    would keep process groups alive with it. Hence the weak reference.
    """
    reference = weakref.WeakMethod(method)

    def accumulated(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    weight.register_post_accumulate_grad_hook(accumulated)
