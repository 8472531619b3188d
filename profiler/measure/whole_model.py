"""Whole model, called as its author wrote it and timed between passes over its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.captured import Captured
from ..layers.error_attribution import blamed
from ..layers.layer_run import LayerRun, backward_pairs
from ..layers.loss_layer import Loss
from ..machine.clock import Clock


class WholeModel:
    """Runs a model forwards and backwards, loss included if there is one.

    Without a ``call`` there is nothing to hold the layers against, and nothing is run. Inputs are
    copied for every run, which may change them in place.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        runs: Sequence[LayerRun],
        inputs: Sequence[Tensor],
        clock: Clock,
        context: Callable[[], AbstractContextManager[object]],
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
