"""One stage on one rank: forwards, backwards, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ..batchnorm.fixed_buffers import FixedBuffers
from ..batchnorm.running_statistics import Statistics
from ..random_state import RandomState, replayed_random_state
from .keyed_dropout import keyed_dropout
from .split_backward import SplitBackward

LossOfFlat = Callable[[Any, Any], Tensor]


@dataclass
class _Kept:
    """Of one micro-batch, from its forward to its backward.

    Attributes:
        microbatch: Which one.
        received: The stage's inputs, leaves of its graph.
        roots: Where each output's gradient enters the graph; `None` for outputs without one. Not
            the outputs themselves: what was sent is let go.
        random: The random state before a forward that is to be recomputed.
        target: For the last stage's loss.
        seed: The gradient that enters at the loss.
        split: The second part of its backward.
    """

    microbatch: int
    received: tuple[Tensor, ...]
    roots: list[GradientEdge | None] = field(default_factory=list)
    random: RandomState | None = None
    target: Any = None
    seed: Tensor | None = None
    split: SplitBackward | None = None


class StageRunner:
    """Runs the actions of one stage.

    Args:
        module: Flat tensors in, a tuple of tensors out.
        received: Specs of its inputs; those marked ``requires_grad`` have their gradients sent
            back.
        sent: Specs of its outputs likewise; empty for the last stage.
        loss: For the last stage: this micro-batch's share of the loss; `None` elsewhere.
        device: Where the stage is.
        statistics: Moves running statistics when a step ends; `None` to leave that to the modules.
        autocast: The dtype that module and loss are cast to; `None` for none. A backward runs
            outside of it: it takes each operation's dtype from its forward.
        fixed: Sees that forwards leave buffers alone; `None` where no other rank has the stage.
    """

    def __init__(
        self,
        module: nn.Module,
        received: Sequence[TensorSpec],
        sent: Sequence[TensorSpec],
        loss: LossOfFlat | None,
        device: torch.device,
        statistics: Statistics | None = None,
        autocast: torch.dtype | None = None,
        fixed: FixedBuffers | None = None,
    ) -> None:
        self.module = module
        self.statistics, self._fixed = statistics, fixed
        self._received, self._sent = received, sent
        self._loss, self._device, self._autocast = loss, device, autocast
        self._kept: dict[int, _Kept] = {}
        self.losses: list[Tensor] = []
        self.loss_scale = 1.0
        """What gradients are multiplied by, for half precision."""
        self.dropout_key: tuple[int, int] | None = None
        """Seed and step that random numbers follow; `None` for the generators' own course."""

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        *,
        target: Any = None,
        recomputed: bool = False,
        trains: bool = True,
    ) -> list[Any]:
        """Run the stage on a micro-batch.

        Args:
            microbatch: Which one.
            inputs: Tensors that nothing else uses a gradient of.
            target: For the last stage.
            recomputed: Keep the inputs alone; `recompute` has to come before the backward.
            trains: Whether a backward will follow.

        Returns:
            The outputs, without a graph.
        """
        if not trains:
            with torch.no_grad(), self._buffers_kept(), autocast_to(self._device, self._autocast):
                outputs = list(self.module(*inputs))
                if self._loss is not None and target is not None:
                    self.losses.append(self._loss(outputs, target).detach())
            return outputs
        with (
            self._buffers_kept(),
            self.statistics.of(microbatch) if self.statistics else nullcontext(),
            autocast_to(self._device, self._autocast),
        ):
            return self._forward(microbatch, inputs, target, recomputed)

    def _forward(
        self, microbatch: int, inputs: Sequence[Tensor], target: Any, recomputed: bool
    ) -> list[Any]:
        kept = _Kept(microbatch, self._leaves(inputs), target=target)
        self._kept[microbatch] = kept
        if recomputed:
            kept.random = RandomState.now(self._device)
            with torch.no_grad():
                outputs = self._outputs(kept)
                if self._loss is not None:
                    self.losses.append(self._share_of_loss(outputs, kept))
        else:
            outputs = self._with_graph(kept)
            if self._loss is not None:
                self.losses.append(outputs.pop())
        return [value.detach() if isinstance(value, Tensor) else value for value in outputs]

    def recompute(self, microbatch: int) -> None:
        """Run a forward again, for its graph."""
        kept = self._kept[microbatch]
        if kept.random is not None:
            with (
                replayed_random_state(self.module, kept.random, self._device),
                self.statistics.again(microbatch) if self.statistics else nullcontext(),
                autocast_to(self._device, self._autocast),
            ):
                self._with_graph(kept)
            kept.random = None

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor], *, split: bool = False
    ) -> list[Tensor]:
        """Go back through a micro-batch; gradients of weights are accumulated in ``.grad``.

        Args:
            microbatch: Which one.
            gradients: Of the outputs marked ``requires_grad``, in order; none for the last stage.
            split: Leave the gradients of weights to `backward_weight` where that can be done.

        Returns:
            Gradients of the inputs marked ``requires_grad``.
        """
        self.recompute(microbatch)
        kept = self._kept[microbatch]
        roots, arriving = self._paired(kept, gradients)
        inputs = [leaf for leaf in kept.received if leaf.requires_grad]
        if split:
            kept.split = SplitBackward(roots, arriving, inputs)
            kept.split.of_inputs()
        else:
            if roots:
                torch.autograd.backward(roots, arriving)
            del self._kept[microbatch]
        kept.roots = []
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]

    def backward_weight(self, microbatch: int) -> None:
        """The second part of a split backward."""
        kept = self._kept.pop(microbatch)
        assert kept.split is not None
        kept.split.of_weights()

    def begin(self, *, trains: bool) -> None:
        """A step begins; what an interrupted one left is dropped."""
        self._kept.clear()
        self.losses.clear()
        if self._fixed is not None and not trains:
            self._fixed.check_evaluation()
        if self.statistics is not None and trains:
            self.statistics.begin()

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _buffers_kept(self) -> AbstractContextManager[None]:
        return self._fixed.kept() if self._fixed is not None else nullcontext()

    def _outputs(self, kept: _Kept) -> list[Any]:
        if self.dropout_key is None:
            return list(self.module(*kept.received))
        seed, step = self.dropout_key
        with keyed_dropout(
            self.module, seed=seed, step=step, microbatch=kept.microbatch, device=self._device
        ):
            return list(self.module(*kept.received))

    def _leaves(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            value.detach().requires_grad_(spec.requires_grad)
            for value, spec in zip(inputs, self._received, strict=True)
        )

    def _with_graph(self, kept: _Kept) -> list[Any]:
        """The outputs, and the loss behind them on the last stage; their graph is kept."""
        outputs = self._outputs(kept)
        if self._loss is None:
            kept.roots = [_root(value) for value in outputs]
            self._check_captured_as_trained(kept.roots)
            return outputs
        loss = self._share_of_loss(outputs, kept)
        kept.roots, kept.seed = [_root(loss)], torch.full_like(loss, self.loss_scale)
        return [*outputs, loss.detach()]

    def _check_captured_as_trained(self, roots: Sequence[GradientEdge | None]) -> None:
        """Refuse to drop gradients: the next stage sends those alone that capture saw needed."""
        for root, spec in zip(roots, self._sent, strict=True):
            if root is not None and not spec.requires_grad:
                raise InvalidInput(
                    f"{spec.name!r} needs a gradient, and needed none when the model was captured: "
                    "weights in front of a cut were frozen then, and are trained now; make the "
                    "pipeline again after unfreezing them, from a profile of the model as it is now"
                )

    def _share_of_loss(self, outputs: Sequence[Any], kept: _Kept) -> Tensor:
        assert self._loss is not None
        assert kept.target is not None
        return self._loss(outputs, kept.target)

    def _paired(
        self, kept: _Kept, gradients: Sequence[Tensor]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where gradients enter, and the gradients."""
        if self._loss is not None:
            (root,) = kept.roots
            assert kept.seed is not None
            return ([root], [kept.seed]) if root is not None else ([], [])
        marked = [
            root for root, spec in zip(kept.roots, self._sent, strict=True) if spec.requires_grad
        ]
        pairs = [
            (root, gradient)
            for root, gradient in zip(marked, gradients, strict=True)
            if root is not None
        ]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _root(value: Any) -> GradientEdge | None:
    if isinstance(value, Tensor) and value.requires_grad:
        return get_gradient_edge(value)
    return None


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to a dtype, if there is one."""
    if dtype is None:
        return nullcontext()
    # Weights are cast anew in every action: a cache would outlive the step that fills it.
    return torch.autocast(device.type, dtype, cache_enabled=False)
