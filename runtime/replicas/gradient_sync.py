"""Sum gradients over the ranks that hold the same weights: replicas, and stages with tied ones.

Gradients are summed in buckets. A bucket leaves when the last backward of every stage that uses
its weights here has been through them, so most of the time that summing takes is hidden behind the
rest of that backward and other stages' work. All ranks of a group send their buckets in one order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ranks.collective import Collective, Work

BUCKET_BYTES = 25 * 2**20
"""As large as DistributedDataParallel's: large enough for a link, small enough to leave early."""


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several ranks hold.

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
        ranks: Those.
        incomplete: The weights whose gradients are still added to.
        without: Positions of those that no micro-batch here gave a gradient.
        under_way: The message, and what to wait for, once it has left.
    """

    weights: list[SharedWeight]
    ranks: Collective
    incomplete: set[int] = field(default_factory=set)
    without: list[int] = field(default_factory=list)
    under_way: tuple[Tensor, Work] | None = None

    def send(self) -> None:
        """All gradients, and behind them a one for each weight that has any here."""
        tensors = [weight.tensor for weight in self.weights]
        self.without = [at for at, tensor in enumerate(tensors) if tensor.grad is None]
        has_one = tensors[0].new_ones(len(tensors))
        if self.without:
            has_one[self.without] = 0
        message = torch.cat([*(_row(tensor) for tensor in tensors), has_one.detach()])
        self.under_way = (message, self.ranks.sum(message))

    def receive(self) -> None:
        """Put the sums where gradients are; where no rank has one there is none."""
        assert self.under_way is not None, "a stage had no last backward"
        message, work = self.under_way
        work.wait()
        self.under_way = None
        tensors = [weight.tensor for weight in self.weights]
        *parts, has_one = message.split([*(t.numel() for t in tensors), len(tensors)])
        # Looked at only where this rank does not know: on a GPU it has to wait for the numbers.
        somewhere = has_one.tolist() if self.without else []
        for at in self.without:
            if somewhere[at]:
                tensors[at].grad = torch.empty_like(tensors[at])
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor.grad is not None:
                tensor.grad.copy_(part.view_as(tensor.grad))


class GradientSync:
    """Sums the gradients of one rank's shared weights.

    Which weights are trained is looked up when a step begins, so they may be frozen and unfrozen
    between steps, on all ranks that hold them alike.

    Args:
        weights: Those this rank holds; all ranks that hold one have it after the same others of
            its set of ranks.
        ranks: For each set of ranks what they do together.
        stages_here: The stages this rank runs.
    """

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        ranks: Mapping[tuple[int, ...], Collective],
        stages_here: Iterable[int],
    ) -> None:
        here = set(stages_here)
        self._weights, self._ranks = list(weights), ranks
        self._stages = {id(weight.tensor): here.intersection(weight.stages) for weight in weights}
        self._trained: list[SharedWeight] = []
        self._buckets: list[_Bucket] = []
        self._hooked: set[int] = set()
        self._waiting: dict[int, set[int]] = {}
        self._at_last: int | None = None
        self._summed = {id(weight.tensor) for weight in weights}

    def begin(self, *, sums: bool = True) -> None:
        """A step begins; if it ``sums``, its gradients are summed when it ends.

        What is in ``.grad`` already, if a step before summed it, is on every rank: each keeps its
        share of it, so that it is not counted again. To keep it apart would take a second
        gradient's memory.
        """
        trained = [weight for weight in self._weights if weight.tensor.requires_grad]
        for weight in trained:
            if id(weight.tensor) in self._summed:
                self._summed.discard(id(weight.tensor))
                if weight.tensor.grad is not None:
                    weight.tensor.grad /= len(weight.ranks)
        if not sums:
            return
        if [id(w.tensor) for w in trained] != [id(w.tensor) for w in self._trained]:
            self._arrange(trained)
        self._waiting = {
            id(weight.tensor): set(self._stages[id(weight.tensor)]) for weight in trained
        }
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
        """A gradient was added to; the last time, its bucket may be complete."""
        if self._at_last is None or self._waiting.get(id(tensor)) != {self._at_last}:
            return
        for bucket in self._buckets:
            bucket.incomplete.discard(id(tensor))
        self._send_complete()

    def _send_complete(self) -> None:
        """Send what is complete; of one set of ranks none before those in front of it."""
        held_up: set[int] = set()
        for bucket in self._buckets:
            if bucket.incomplete:
                held_up.add(id(bucket.ranks))
            elif bucket.under_way is None and id(bucket.ranks) not in held_up:
                bucket.send()


def _row(tensor: Tensor) -> Tensor:
    """A weight's gradient as one row; zeros where no micro-batch here gave it one."""
    if tensor.grad is None:
        return tensor.detach().new_zeros(tensor.numel())
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


def register_accumulation_hook(weight: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call a method whenever autograd has added to a weight's gradient, while its object lives.

    A weight holds its hooks where the garbage collector does not look. One that holds its object,
    which holds the weight, would be kept for ever, with process groups and all.
    """
    reference = weakref.WeakMethod(method)

    def accumulated(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    weight.register_post_accumulate_grad_hook(accumulated)
