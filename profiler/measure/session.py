"""Measuring session: passes over the layers alternate with runs of the whole model.

Repeats go to the layers whose spread makes the total uncertain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from math import sqrt
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.captured import Captured
from ...core.progress import Progress
from ..layers.error_attribution import blamed
from ..layers.layer_run import LayerRun, backward_pairs
from ..layers.loss_layer import Loss
from ..layers.precision import Context
from ..machine.clock import Clock
from .timed_passes import Passes, Samples

TOTAL_ERROR = 0.005
"""Standard error of the sum over all layers, relative to it, that is good enough."""

IQR_TO_ERROR = 1.2533 / 1.349
"""From quartile distance to the standard error of a median of one: a normal distribution's
quartiles are 1.349 standard deviations apart, its sample median errs 1.2533 times as much as its
mean (sqrt(pi / 2))."""

GOLDEN_SECTION = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly however many there are (Knuth, vol. 3, 6.4)."""


def standard_error(samples: Sequence[float]) -> float:
    """Return the standard error of the samples' median; infinite for fewer than two."""
    if len(samples) < 2:
        return float("inf")
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    return IQR_TO_ERROR * (upper - lower) / sqrt(len(samples))


def worth_repeating(samples: Sequence[Sequence[float]], counts: Sequence[int]) -> list[int]:
    """Choose the layers to measure again; none once the total is certain enough.

    The errors of layers add up as their squares; that of a layer that stands for ``count`` equal
    ones counts ``count`` times. Those with the largest share are chosen until what the others
    contribute is at most half of the allowed standard error, which is relative to the total.
    """
    # Variances of independent layers add up; a layer that stands for `count` equal ones has one
    # sample for all of them, so its errors are fully correlated and count squared.
    shares = [
        (count * standard_error(durations)) ** 2
        for durations, count in zip(samples, counts, strict=True)
    ]
    total = sum(
        count * median(durations) if durations else 0.0
        for durations, count in zip(samples, counts, strict=True)
    )
    allowed = (TOTAL_ERROR * total) ** 2
    if sum(shares) <= allowed:
        return []
    # Largest shares first, until the rest cannot use up more than half of what is allowed: the
    # other half is left for the chosen layers, whose error shrinks with the next repeat.
    chosen: list[int] = []
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        rest = sum(share for i, share in enumerate(shares) if i not in chosen)
        if chosen and rest <= allowed / 2:
            break
        chosen.append(index)
    return sorted(chosen)


def representative(members: Sequence[int], turn: int) -> int:
    """Another member every turn, spread evenly over all of them, the middle one first.

    A layer measured every time would find its weights in the cache; in the model all its equals
    have been in between.
    """
    return members[int(len(members) * ((0.5 + turn * GOLDEN_SECTION) % 1.0))]


class WholeModel:
    """Runner of a model forwards and backwards, loss included if there is one.

    Without a ``call`` there is nothing to hold the layers against, and nothing is run. Inputs are
    copied for every run, which may change them in place.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        runs: Sequence[LayerRun],
        inputs: Sequence[Tensor],
        clock: Clock,
        context: Context,
    ) -> None:
        self._call, self._runs, self._inputs = call, runs, inputs
        self._clock, self._context = clock, context
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def run(self) -> None:
        """Run the model once, forwards and backwards."""
        if self._call is None:
            return
        with blamed(*self._runs):
            # Cloned before the clock starts: the model may change its inputs in place.
            inputs = [tensor.clone() for tensor in self._inputs]
            self._clock.settle()
            with self._context():
                start = self._clock.mark()
                output = self._call(*inputs)
                middle = self._clock.mark()
            roots, gradients = backward_pairs(pytree.tree_leaves(output))
            begin = self._clock.mark()
            if roots:
                torch.autograd.backward(roots, gradients)
            end = self._clock.mark()
            self.forward_s.append(self._clock.seconds(start, middle))
            self.backward_s.append(self._clock.seconds(begin, end))


def eager_call(captured: Captured, loss: Loss | None) -> Callable[..., Any]:
    """Return a call of the uncaptured model on flat inputs, followed by the loss."""
    model, structure = captured.program.model, captured.structure

    def call(*inputs: Tensor) -> Any:
        args, kwargs = structure.unflatten(inputs)
        output = model(*args, **kwargs)
        return output if loss is None else loss(output)

    return call


MIN_PASSES = 3
"""Over one layer of every class; the whole model runs as often."""

MIN_SPLIT_PASSES = 2
"""With gradients of inputs and of parameters apart."""

SPLIT_EVERY = 3
"""Number of passes, made because the total is uncertain, per one that splits the gradients."""

MAX_PASSES = 60
WHOLE_RUNS = 5

WORTHWHILE = 1 / 12
"""Where measuring one layer of every class takes less than this share of measuring every layer as
often as the least, repeats stop there: most of the saving is kept."""


class Measuring:
    """Session that fills the samples of every layer class and times the whole model between.

    Layers of a class cost the same and share their samples; the loss is a class by itself.
    """

    def __init__(
        self,
        passes: Passes,
        whole: WholeModel,
        classes: Sequence[Sequence[int]],
        samples: Sequence[Samples],
        names: Sequence[str],
        progress: Progress | None = None,
    ) -> None:
        self._passes, self._whole, self._classes = passes, whole, classes
        self._samples = [samples[members[0]] for members in classes]
        self._names, self._progress = names, progress or (lambda *_: None)
        self._turns = count()
        self._done = self._planned = 0
        self.layers_s = 0.0
        """Time the recorded passes took, with everything around them."""

    def run(self, budget_s: float, *, split: bool = True) -> None:
        """Measure until the total is certain enough or the budget for passes is spent.

        The minimum of passes is made in any case; with ``split``, some take gradients of inputs
        and parameters apart.
        """
        every = range(len(self._classes))
        split_passes = MIN_SPLIT_PASSES if split else 0
        self._planned = len(every) * (1 + MIN_PASSES + split_passes)
        self._pass(every, split=split, keep=False)  # whole backwards are warm from the first run
        self.layers_s = 0.0
        # In turns, so that a clock that slows down as the device warms up affects both alike and
        # the difference of layers and whole model stays the profile's own error.
        for done in range(MIN_PASSES):
            self._whole.run()
            self._pass(every)
            if done < split_passes:
                self._pass(every, split=True)
        self._repeat(min(budget_s, self._worthwhile_s()), split=split)
        self._progress(self._planned, self._planned, "whole model")

    def _repeat(self, budget_s: float, *, split: bool) -> None:
        """Run further passes over the layers that make the total uncertain, in the budget."""
        counts = [len(members) for members in self._classes]
        for extra in range(1, MAX_PASSES - MIN_PASSES + 1):
            totals = [samples.total_s() for samples in self._samples]
            chosen = worth_repeating(totals, counts)
            if not chosen or self.layers_s + sum(median(totals[i]) for i in chosen) > budget_s:
                return
            self._planned += len(chosen)
            if len(self._whole.forward_s) < WHOLE_RUNS:
                self._whole.run()
            self._pass(chosen, split=split and extra % SPLIT_EVERY == 0)

    def _worthwhile_s(self) -> float:
        """Return how long repeats may take where layers repeat; infinite where they hardly do."""
        alone = sum(median(samples.total_s()) for samples in self._samples)
        every = sum(
            len(members) * median(samples.total_s())
            for members, samples in zip(self._classes, self._samples, strict=True)
        )
        limit_s = WORTHWHILE * self.layers_s * every / alone if alone else 0.0
        return limit_s if self.layers_s < limit_s else float("inf")

    def _pass(self, chosen: Sequence[int], *, split: bool = False, keep: bool = True) -> None:
        """Run one pass over a layer of each chosen class, a different one every time."""
        turn = next(self._turns)
        layers = sorted(representative(self._classes[index], turn) for index in chosen)
        started = time.perf_counter()
        self._passes.run(layers, split=split, keep=keep, tell=self._tell)
        self.layers_s += time.perf_counter() - started

    def _tell(self, layer: int) -> None:
        self._progress(self._done, self._planned, self._names[layer])
        self._done += 1
