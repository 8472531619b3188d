"""One stage on one rank: its forwards and backwards, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...capture.observation.autocast_cache import convert_once
from ...capture.program.segment import Segment, has_checkpoints
from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ..batchnorm.fixed_buffers import FixedBuffers
from ..batchnorm.running_statistics import Statistics
from ..changed_buffers import BufferValues, ChangedBuffers
from ..local.layer_checkpoints import LayerCheckpoints
from ..random_state import RandomState, replay_random_state
from .aux_losses import AuxLossReader
from .keyed_dropout import keyed_dropout
from .split_backward import SplitBackward

LossOfFlat = Callable[[Any, Any], Tensor]
"""Computes a share of the loss from the flat outputs of the last stage and a target."""


@dataclass
class _InFlight:
    """State of a micro-batch between its forward and its backward.

    Attributes:
        microbatch: Index of the micro-batch.
        received: The stage's inputs, which are leaves of its autograd graph.
        roots: The gradient edge of each output; `None` for outputs without a gradient. Outputs
            themselves are not kept, so that they are freed once they are sent.
        random: The random state before a forward that will be recomputed.
        buffers: What that forward found in the buffers that it changed.
        target: Target for the last stage's loss.
        loss: The gradient edge of this stage's share of the batch's loss, if it has a gradient.
        seed: The gradient of that.
        split: The backward whose second part is still to come.
    """

    microbatch: int
    received: tuple[Tensor, ...]
    roots: list[GradientEdge | None] = field(default_factory=list)
    random: RandomState | None = None
    buffers: BufferValues = field(default_factory=dict)
    target: Any = None
    loss: GradientEdge | None = None
    seed: Tensor | None = None
    split: SplitBackward | None = None


class StageRunner:
    """Runner of the actions of one stage.

    Gradients of inputs marked ``requires_grad`` are sent back. On the last stage, which sends
    nothing, ``loss`` computes a micro-batch's share of the loss. ``statistics`` moves running
    statistics when a step ends, in place of the modules; ``fixed`` checks that forwards leave
    buffers unchanged, for a stage with replicas. ``aux`` reads the stage's own losses, of which a
    micro-batch's share is ``aux_share``. Backwards run outside of autocast: each operation keeps
    its forward's dtype. Autocast converts weights once a step, inside of `keep_conversions`, or for
    every forward unless the stage ``keeps_weights``, as sharded ones are gathered again and again.
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
        aux: AuxLossReader | None = None,
        aux_share: float = 1.0,
        keeps_weights: bool = True,
    ) -> None:
        self.module = module
        self._aux, self._aux_share = aux, aux_share
        self.statistics, self._fixed = statistics, fixed
        self._changed = ChangedBuffers(module)
        self._checkpoints: LayerCheckpoints | None = None
        if isinstance(module, Segment) and has_checkpoints(module):
            # Steps are whole here: nothing changes weights between a forward and its backward.
            self._checkpoints = LayerCheckpoints(module, nn.Module())
        self._received, self._sent = received, sent
        self._loss, self._device, self._autocast = loss, device, autocast
        self._keeps_weights = keeps_weights
        self._in_flight: dict[int, _InFlight] = {}
        self.losses: list[Tensor] = []
        self.loss_scale = 1.0
        """Factor on all gradients, for half precision."""
        self.dropout_key: tuple[int, int] | None = None
        """Seed and step of keyed dropout; `None` to draw from the generators as they are."""

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        *,
        target: Any = None,
        recomputed: bool = False,
        trains: bool = True,
    ) -> list[Any]:
        """Run the stage on a micro-batch and return its outputs without a graph.

        If ``recomputed``, only the inputs are kept, and `recompute` must come before the backward;
        it computes the losses. ``trains`` says whether a backward will follow.
        """
        if not trains:
            with (
                torch.no_grad(),
                self._checked_buffers(),
                autocast_to(self._device, self._autocast),
            ):
                outputs = list(self.module(*inputs))
                if self._loss is not None and target is not None:
                    self.losses.append(self._loss(outputs, target).detach())
            return outputs
        with (
            self._checked_buffers(),
            self.statistics.of(microbatch) if self.statistics else nullcontext(),
            self._converting(recomputed=recomputed),
        ):
            return self._training_forward(microbatch, inputs, target, recomputed)

    def _training_forward(
        self, microbatch: int, inputs: Sequence[Tensor], target: Any, recomputed: bool
    ) -> list[Any]:
        # Detached leaves cut autograd at the stage's border: the backward of this stage ends in
        # their ``.grad``, which is what the stage before is sent.
        received = tuple(
            value.detach().requires_grad_(spec.requires_grad)
            for value, spec in zip(inputs, self._received, strict=True)
        )
        kept = self._in_flight[microbatch] = _InFlight(microbatch, received, target=target)
        if recomputed:
            kept.random = RandomState.now(self._device)
            with torch.no_grad(), self._changed.record() as kept.buffers:
                outputs, _ = self._run_module(kept)
        else:
            outputs, aux = self._run_module(kept)
            self._begin_graph(kept, outputs, aux)
        return [value.detach() if isinstance(value, Tensor) else value for value in outputs]

    def recompute(self, microbatch: int) -> None:
        """Run a micro-batch's forward again to build its graph, unless it has one."""
        kept = self._in_flight[microbatch]
        if kept.random is None:
            return
        with (
            replay_random_state(kept.random, self._device),
            self._changed.use_copies(kept.buffers),
            self.statistics.again(microbatch) if self.statistics else nullcontext(),
            self._converting(),
        ):
            outputs, aux = self._run_module(kept)
        kept.random, kept.buffers = None, {}
        # ``loss_fn`` runs for the first time here. Unlike the module, it draws new random numbers,
        # and what it changes stays changed.
        with self._checked_buffers("loss"), autocast_to(self._device, self._autocast):
            self._begin_graph(kept, outputs, aux)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor], *, split: bool = False
    ) -> list[Tensor]:
        """Run a micro-batch's backward, accumulating gradients of weights in ``.grad``.

        ``gradients`` are those of the outputs marked ``requires_grad``, none on the last stage;
        returned are those of the inputs marked so. ``split`` leaves gradients of weights to
        `backward_weight` where possible.
        """
        self.recompute(microbatch)
        kept = self._in_flight[microbatch]
        roots, arriving = self._pair_with_roots(kept, gradients)
        inputs = [leaf for leaf in kept.received if leaf.requires_grad]
        if split:
            kept.split = SplitBackward(roots, arriving, inputs)
            kept.split.run_input_part()
        else:
            if roots:
                self._run_backward(roots, arriving)
            del self._in_flight[microbatch]
        kept.roots, kept.loss = [], None
        # The stage before expects a message per input, also for one that no output depends on.
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]

    def backward_weight(self, microbatch: int) -> None:
        """Run the second part of a split backward."""
        kept = self._in_flight.pop(microbatch)
        assert kept.split is not None
        kept.split.run_weight_part()

    def begin(self, *, trains: bool) -> None:
        """Begin a step, dropping what an interrupted one left behind."""
        self._in_flight.clear()
        self.losses.clear()
        if self._fixed is not None and not trains:
            self._fixed.check_evaluation()
        if self.statistics is not None and trains:
            self.statistics.begin()

    def _converting(self, *, recomputed: bool = False) -> AbstractContextManager[Any]:
        """Return the autocast of a forward that trains, or of a first one without a graph."""
        if self._autocast is None or recomputed or not self._keeps_weights:
            return autocast_to(self._device, self._autocast)
        return convert_once(self._device, self._autocast)

    def _checked_buffers(self, what: str = "forward") -> AbstractContextManager[None]:
        return self._fixed.checked(what) if self._fixed is not None else nullcontext()

    def _run_module(self, kept: _InFlight) -> tuple[list[Any], Tensor | None]:
        """Return the outputs, and the micro-batch's share of the stage's auxiliary losses."""
        keyed: AbstractContextManager[Any] = nullcontext()
        if self.dropout_key is not None:
            seed, step = self.dropout_key
            keyed = keyed_dropout(
                self.module, seed=seed, step=step, microbatch=kept.microbatch, device=self._device
            )
        with keyed, self._checkpointed(kept.microbatch):
            if self._aux is None:
                return list(self.module(*kept.received)), None
            outputs, loss = self._aux.run(lambda: self.module(*kept.received))
            return list(outputs), None if loss is None else loss * self._aux_share

    def _run_backward(self, roots: list[GradientEdge], gradients: list[Tensor]) -> None:
        # Checkpointed layers run in it, and on another thread would end what this one's autocast
        # keeps. (On GPUs autograd has threads of its own.)
        threads = torch.autograd.set_multithreading_enabled
        with threads(False) if self._checkpoints is not None else nullcontext():
            torch.autograd.backward(roots, gradients)

    def _checkpointed(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context in which layers run as checkpoints, where the plan asks for that."""
        if self._checkpoints is None:
            return nullcontext()
        if self.statistics is None:
            return self._checkpoints.active()
        return self._checkpoints.active(partial(self.statistics.again, microbatch))

    def _begin_graph(self, kept: _InFlight, outputs: list[Any], loss: Tensor | None) -> None:
        """Compute the loss, which ``loss`` is the auxiliary part of, and keep the graph's roots."""
        if self._loss is not None:
            assert kept.target is not None
            share = self._loss(outputs, kept.target)
            loss = share if loss is None else share + loss
        if loss is not None:
            self.losses.append(loss.detach())
            kept.loss, kept.seed = _gradient_edge(loss), torch.full_like(loss, self.loss_scale)
        if self._loss is None:
            kept.roots = [_gradient_edge(value) for value in outputs]
            self._check_captured_as_trained(kept.roots)

    def _check_captured_as_trained(self, roots: Sequence[GradientEdge | None]) -> None:
        # The next stage sends gradients only of tensors that needed one at capture. Any other
        # gradient would be lost without a word, and weights in front of the cut would not train.
        for root, spec in zip(roots, self._sent, strict=True):
            if root is not None and not spec.requires_grad:
                raise InvalidInput(
                    f"{spec.name!r} needs a gradient, but needed none when the model was captured: "
                    "weights in front of a cut were frozen then and are trained now; profile the "
                    "model as it is now and rebuild the pipeline after unfreezing them"
                )

    def _pair_with_roots(
        self, kept: _InFlight, gradients: Sequence[Tensor]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the gradient edges to start from and the gradient that enters at each."""
        pairs: list[tuple[GradientEdge | None, Tensor]] = []
        if self._loss is None:
            marked = [
                root
                for root, spec in zip(kept.roots, self._sent, strict=True)
                if spec.requires_grad
            ]
            pairs += zip(marked, gradients, strict=True)
        if kept.loss is not None and kept.seed is not None:
            pairs.append((kept.loss, kept.seed))
        # Weights frozen since capture leave outputs without a root; their gradients end here.
        found = [(root, gradient) for root, gradient in pairs if root is not None]
        return [root for root, _ in found], [gradient for _, gradient in found]


def _gradient_edge(value: Any) -> GradientEdge | None:
    if isinstance(value, Tensor) and value.requires_grad:
        return get_gradient_edge(value)
    return None


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return an autocast context for a dtype, or a null context for `None`."""
    if dtype is None:
        return nullcontext()
    # Weights are converted anew in every forward: a cache would outlive the step that fills it.
    return torch.autocast(device.type, dtype, cache_enabled=False)
