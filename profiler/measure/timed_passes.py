"""Layers timed inside forward and backward passes over the model, as they run in training.

A pass runs the chosen layers forwards in the model's order, keeping their graphs, then backwards in
reverse. So every layer finds caches, freed memory and fresh inputs as it does in the whole model; a
layer run over and over by itself finds its weights and saved activations still warm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, fx

from ...capture.program.program import tensors_of
from ...capture.torch_defects import NEEDS_INPUT_GRADIENT
from ..layers.error_attribution import blamed
from ..layers.layer_run import LayerRun, Values, detached, mapped
from ..layers.precision import Context
from ..machine.clock import Clock, Mark

Phase = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass
class Samples:
    """Seconds of one layer by phase, one per repeat: of the device, and until all was issued."""

    device_s: dict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))
    dispatch_s: dict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))
    least_dispatch_s: dict[Phase, float] = field(default_factory=dict)

    def total_s(self) -> list[float]:
        """Return forward plus backward of each repeat that has both."""
        pairs = zip(self.device_s["forward"], self.device_s["backward"], strict=False)
        return [forward + backward for forward, backward in pairs]


@dataclass
class _Kept:
    """A layer between its forward and its backward."""

    index: int
    leaves: list[Tensor]
    outputs: list[tuple[fx.Node | None, list[Tensor]]]
    read: list[tuple[fx.Node, list[Tensor]]]


@dataclass(frozen=True)
class _Span:
    """One measurement, to be read off the clock when the pass is over."""

    index: int
    phase: Phase
    start: Mark
    end: Mark


class Passes:
    """Runner of passes that gathers samples; layers that share a list of them are one.

    A layer whose producer is left out of a pass reads the producer's entry in ``values``.
    """

    def __init__(
        self,
        runs: Sequence[LayerRun],
        values: Values,
        clock: Clock,
        context: Context,
        samples: Sequence[Samples],
    ) -> None:
        self._runs, self._values, self._samples = runs, values, samples
        self._clock, self._context = clock, context
        # The last layer that reads a value: after it the pass lets go of the value, as a real
        # step would, so that memory in use and caches are those of training.
        self._last_read = {node: index for index, run in enumerate(runs) for node in run.reads}
        self._spans: list[_Span] = []

    def run(
        self,
        chosen: Sequence[int],
        *,
        split: bool = False,
        keep: bool = True,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Run one pass over the chosen layers in ascending order; one that is not kept warms up.

        With ``split``, gradients of inputs and of parameters are taken in two goes, as zero-bubble
        schedules do: first all inputs' with the graphs kept, then all parameters'. Each goes
        through the layer again, so together they cost more than the whole backward.
        """
        kept = self._forward(chosen, tell)
        if split:
            self._split_backward(kept)
        else:
            self._backward(kept)
        # Read the clock only now: reading an event waits for the device, which would drain the
        # queue between layers in the middle of the pass.
        for span in self._spans:
            dispatch_s = span.end.host_s - span.start.host_s
            samples = self._samples[span.index]
            least_s = samples.least_dispatch_s.get(span.phase, dispatch_s)
            samples.least_dispatch_s[span.phase] = min(least_s, dispatch_s)
            if keep:
                samples.device_s[span.phase].append(self._clock.seconds(span.start, span.end))
                samples.dispatch_s[span.phase].append(dispatch_s)
        self._spans.clear()

    def _forward(self, chosen: Sequence[int], tell: Callable[[int], None]) -> list[_Kept]:
        fresh: dict[fx.Node, object] = {}
        kept = []
        for index in chosen:
            run = self._runs[index]
            tell(index)
            with blamed(run):
                leaves = run.leaves(self._inputs(run, fresh))
                arguments = run.arguments(leaves)
                with self._context(), self._timed(index, "forward"):
                    outputs = run.function(*arguments)
                del arguments  # copies made for this call; autograd keeps what backward needs
                for node, value in zip(run.writes, outputs, strict=True):
                    if node is not None:
                        fresh[node] = detached(value)
                kept.append(_kept(index, run, leaves, outputs))
            fresh = {n: value for n, value in fresh.items() if self._last_read.get(n, -1) > index}
        return kept

    def _inputs(self, run: LayerRun, fresh: Values) -> dict[fx.Node, object]:
        """Return inputs this pass produced, or cache-warm copies of ones produced earlier."""
        return {
            node: fresh[node] if node in fresh else mapped(torch.clone, self._values[node])
            for node in run.reads
        }

    def _backward(self, kept: list[_Kept]) -> None:
        pending: Pending = {}
        # Pop, so that each layer's graph and outputs are freed as soon as its backward is done.
        while kept:
            layer = kept.pop()
            with blamed(self._runs[layer.index]):
                roots, gradients = _roots(layer, pending)
                with self._timed(layer.index, "backward"):
                    if roots:
                        torch.autograd.backward(roots, gradients)
                        _hand_back(layer, [leaf.grad for leaf in layer.leaves], pending)

    def _split_backward(self, kept: list[_Kept]) -> None:
        pending: Pending = {}
        weights_later = []
        for layer in reversed(kept):
            with blamed(self._runs[layer.index]):
                roots, gradients = _roots(layer, pending)
                with self._timed(layer.index, "backward_input"):
                    _hand_back(layer, _input_gradients(layer, roots, gradients), pending)
                # The graph is needed again for the parameters; only the outputs may go.
                leaves = [leaf for leaf in layer.leaves if leaf.requires_grad]
                weights_later.append((layer.index, roots, gradients, leaves))
        kept.clear()
        for index, roots, gradients, leaves in weights_later:
            run = self._runs[index]
            wanted = [*run.parameters, *(leaves if _needs_input_gradients(roots) else ())]
            with blamed(run), self._timed(index, "backward_weight"):
                if roots and run.parameters:
                    torch.autograd.backward(roots, gradients, inputs=wanted)

    @contextmanager
    def _timed(self, index: int, phase: Phase) -> Iterator[None]:
        """Time a phase from an idle device to the end of its work."""
        # An idle device first, then a sleep as long as issuing takes (a phase not run yet takes
        # about as long as the others): the host runs ahead of the device, so launch latency does
        # not show between the kernels. The least, since a layer that waits for the device waits
        # for the sleep, too: sleeping as long as issuing took last time would grow without end.
        self._clock.settle()
        least_s = self._samples[index].least_dispatch_s
        self._clock.head_start(least_s.get(phase, max(least_s.values(), default=0.0)))
        start = self._clock.mark()
        yield
        self._spans.append(_Span(index, phase, start, self._clock.mark()))


def _needs_input_gradients(roots: list[Tensor]) -> bool:
    """Return True if the graph holds a node of `NEEDS_INPUT_GRADIENT`."""
    seen = {root.grad_fn for root in roots}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name() in NEEDS_INPUT_GRADIENT:
            return True
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    return False


def _input_gradients(
    layer: _Kept, roots: list[Tensor], gradients: list[Tensor]
) -> list[Tensor | None]:
    """Compute the gradient of each leaf; the graph is kept for the parameters' gradients."""
    wanted = [leaf for leaf in layer.leaves if leaf.requires_grad]
    if not roots or not wanted:
        return [None] * len(layer.leaves)
    found = iter(
        torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    )
    return [next(found) if leaf.requires_grad else None for leaf in layer.leaves]


def _kept(index: int, run: LayerRun, leaves: list[object], outputs: Sequence[object]) -> _Kept:
    return _Kept(
        index=index,
        leaves=list(tensors_of(leaves)),
        outputs=[
            (node, list(tensors_of(value))) for node, value in zip(run.writes, outputs, strict=True)
        ],
        read=[(node, list(tensors_of(leaf))) for node, leaf in zip(run.reads, leaves, strict=True)],
    )


Pending = dict[fx.Node, list[Tensor | None]]
"""Gradients of values, as later layers have handed them back so far."""


def _roots(layer: _Kept, pending: Pending) -> tuple[list[Tensor], list[Tensor]]:
    """Return where a layer's backward starts and its gradients: ones where none came back."""
    roots, gradients = [], []
    for node, tensors in layer.outputs:
        found = pending.pop(node, None) if node is not None else None
        for tensor, gradient in zip(tensors, found or [None] * len(tensors), strict=True):
            if tensor.requires_grad:
                roots.append(tensor)
                gradients.append(torch.ones_like(tensor) if gradient is None else gradient)
    return roots, gradients


def _hand_back(layer: _Kept, found: list[Tensor | None], pending: Pending) -> None:
    """Add gradients of its inputs to those that other readers handed back."""
    remaining = iter(found)
    for node, tensors in layer.read:
        new = [next(remaining) for _ in tensors]
        if node not in pending:
            pending[node] = new
        else:  # out of place: the earlier gradient may be a buffer that autograd owns
            pending[node] = [
                theirs if ours is None else ours if theirs is None else theirs + ours
                for theirs, ours in zip(pending[node], new, strict=True)
            ]
