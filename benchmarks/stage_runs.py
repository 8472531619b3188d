"""A stage of a model on its own, doing what its rank does in a step: the measured side of a plan.

Values that cross its edges are real ones, computed once; buffers are taken, filled, kept and let
go as torch's pipeline engine does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.capture.capture import trace
from stagewright.capture.captured import Captured
from stagewright.capture.sample import CallStructure, read_sample
from stagewright.core.plan.plan import Plan
from stagewright.core.plan.schedule import POSTED_AHEAD
from stagewright.core.profile.profile import Profile
from stagewright.runtime.partition.boundary import enter, enter_copy, leave

LossFunction = Callable[[Any, Tensor], Tensor]


class ModelRun:
    """A captured model and one micro-batch.

    Args:
        captured: The model.
        flat: Its inputs.
        target: What the last stage takes the loss against.
        loss_fn: Its loss.
    """

    def __init__(
        self,
        captured: Captured,
        flat: Sequence[Tensor],
        target: Tensor | None = None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self.captured, self.target, self.loss_fn = captured, target, loss_fn
        self._values = {0: list(flat)}

    @classmethod
    def of(
        cls, profile: Profile, model: nn.Module, sample: Any, target: Tensor, loss: LossFunction
    ) -> Self:
        """Return a model captured again as it was for its profile."""
        recipe = CallStructure.from_json(profile.input_structure).recipe
        captured = trace(model, sample, check=False, recipe=recipe)
        return cls(captured, read_sample(model, sample)[1], target, loss)

    @property
    def num_layers(self) -> int:
        return len(self.captured.layers)

    @property
    def cuts(self) -> list[int]:
        """Layers in front of which it may be cut, its two ends included."""
        inner = [cut.boundary.after + 1 for cut in self.captured.cuts if cut.boundary.legal]
        return [0, *inner, self.num_layers]

    def segment(self, first: int, last: int) -> nn.Module:
        """Layers as the runtime cuts them, but the first ones work on the batch itself."""
        copies = self.captured.mutates_inputs(first, last)
        entry = (enter_copy if copies else enter) if first else None
        return self.captured.segment(first, last, enter=entry, leave=leave)

    def values(self, position: int) -> list[Tensor]:
        """Return what crosses a cut in front of a layer, or goes into the model."""
        if position not in self._values:
            before = max(known for known in self._values if known < position)
            with torch.no_grad():
                inputs = [value.clone() for value in self._values[before]]
                found = self.segment(before, position)(*inputs)
            self._values[position] = [value.contiguous() for value in found]
        return self._values[position]

    def needs_grad(self, position: int) -> list[bool]:
        """For each of them, whether a gradient comes back."""
        if position == 0:
            return [False] * len(self._values[0])
        return [spec.requires_grad for spec in self.captured.cuts[position - 1].boundary.tensors]


@dataclass(frozen=True)
class Place:
    """Position of a stage in a schedule: layers, micro-batches a step, most of them in flight.

    Attributes:
        recompute: Keep only what arrives, and run the forward again in the backward.
    """

    first: int
    last: int
    microbatches: int
    in_flight: int
    recompute: bool = False

    def order(self) -> Iterator[str]:
        """F and B, as GPipe (all in flight) and 1F1B (fewer) interleave them."""
        done = min(self.in_flight, self.microbatches)
        yield from "F" * done
        for _ in range(self.microbatches):
            yield "B"
            if done < self.microbatches:
                done += 1
                yield "F"


def places(plan: Plan) -> list[Place]:
    """Return the stages of a plan."""
    lasts = list(accumulate(plan.balance))
    return [
        Place(
            last - count,
            last,
            plan.num_microbatches,
            stage.in_flight,
            recompute=stage.recompute == "always",
        )
        for last, count, stage in zip(lasts, plan.balance, plan.stages, strict=True)
    ]


class StageRunner:
    """One stage, ready to run steps alone.

    Args:
        run: The model.
        place: Which layers, and where in the schedule.
        context: Around every forward, e.g. autocast.
    """

    def __init__(self, run: ModelRun, place: Place, context: Callable[[], Any]) -> None:
        self.place, self._run, self._context = place, run, context
        self.module = run.segment(place.first, place.last)
        self._given = run.values(place.first)
        self._needs_grad = run.needs_grad(place.first)
        self._is_last = place.last == run.num_layers
        self._returned: list[Tensor] = []
        if not self._is_last:
            pairs = zip(run.values(place.last), run.needs_grad(place.last), strict=True)
            self._returned = [value for value, needed in pairs if needed]

    @property
    def weights_bytes(self) -> int:
        """Parameters and buffers, each once."""
        tensors = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def step(self) -> None:
        """Every forward and backward of a step; gradients are added to what is there."""
        arriving = self._post_ahead(self._receive)
        returning = self._post_ahead(lambda: [value.clone() for value in self._returned])
        buffers: dict[int, list[Tensor]] = {}
        sent: dict[int, tuple[Any, ...]] = {}
        forwards = backwards = 0
        for action in self.place.order():
            if action == "F":
                buffers[forwards] = next(arriving)
                with self._context():
                    sent[forwards] = self._outputs(buffers[forwards])
                forwards += 1
            else:
                self._backward(sent.pop(backwards), next(returning))
                for buffer in buffers.pop(backwards):
                    buffer.grad = None  # sent to the stage in front
                backwards += 1

    def forward(self) -> tuple[Tensor, ...]:
        """One micro-batch forwards; outputs that take part in its backward, the loss at the end."""
        buffers = self._receive()
        with self._context():
            return tuple(self._roots(self._outputs(buffers)))

    def backward(self, roots: tuple[Tensor, ...]) -> None:
        """Its backward."""
        torch.autograd.backward(roots, None if self._is_last else self._returned)

    def _post_ahead(self, make: Callable[[], list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield a buffer for each micro-batch, the next ones posted by then."""
        count = self.place.microbatches
        posted = deque(make() for _ in range(min(POSTED_AHEAD, count)))
        for posted_before in range(len(posted), count + len(posted)):
            found = posted.popleft()
            if posted_before < count:
                posted.append(make())
            yield found

    def _outputs(self, buffers: list[Tensor]) -> tuple[Any, ...]:
        if self.place.recompute:
            return tuple(checkpoint(self.module, *buffers, use_reentrant=False))
        return tuple(self.module(*buffers))

    def _receive(self) -> list[Tensor]:
        if self.place.first == 0:
            return self._given
        return [
            value.detach().clone().requires_grad_(needed)
            for value, needed in zip(self._given, self._needs_grad, strict=True)
        ]

    def _backward(self, sent: tuple[Any, ...], returned: list[Tensor]) -> None:
        torch.autograd.backward(self._roots(sent), None if self._is_last else returned)

    def _roots(self, sent: tuple[Any, ...]) -> list[Tensor]:
        if not self._is_last:
            needed = self._run.needs_grad(self.place.last)
            return [value for value, wanted in zip(sent, needed, strict=True) if wanted]
        if self._run.loss_fn is None or self._run.target is None:
            return [value.float().mean() for value in sent if value.requires_grad]
        output = self._run.captured.unflatten_output(sent)
        with self._context():
            return [self._run.loss_fn(output, self._run.target) / self.place.microbatches]
