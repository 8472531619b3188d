"""Weights that a loss function reads by itself, found in the graph of the loss that it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...core.units import list_some


class LossGraphCheck:
    """Check that a loss depends on no weights but those of the stage that computes it.

    What it reads of other stages is not there on other ranks: its gradient would be lost, and its
    values would be those of the beginning. Weights of no stage are trained by nobody.

    Args:
        model: The whole model, for the names of its weights.
        stage: Computes the loss.
        divided: Names of weights of which ranks hold parts.
    """

    def __init__(self, model: nn.Module, stage: nn.Module, divided: Collection[str] = ()) -> None:
        self._model, self._stage, self._divided = model, stage, divided
        self._is_done = False

    def run(self, loss_fn: Callable[[], Tensor], outputs: Sequence[Any]) -> Tensor:
        """Return a loss of the model's outputs; the first one is checked.

        Raises:
            InvalidInput: It depends on other weights; the message names them.
        """
        if self._is_done:
            return loss_fn()
        # Before the loss is computed: it may change outputs in place, and so their nodes.
        nodes = {output.grad_fn for output in outputs if isinstance(output, Tensor)}
        loss = loss_fn()
        self._is_done = loss.requires_grad
        allowed = {id(each) for each in (*outputs, *self._stage.parameters())}
        leaves = list(_leaves_of(loss, nodes))
        self._check_whole(leaves)
        found = [leaf for leaf in leaves if id(leaf) not in allowed]
        weights = [leaf for leaf in found if isinstance(leaf, nn.Parameter)]
        if weights:
            names = {id(each): name for name, each in self._model.named_parameters()}
            known = sorted({names[id(weight)] for weight in weights if id(weight) in names})
            which = f" ({list_some(known, 3)})" if known else ""
            raise InvalidInput(
                f"loss_fn reads trainable weights{which} that the stage computing the loss does "
                "not hold, so that their gradients would be lost; return what the loss needs from "
                "the model's forward, or use the optimizer's weight_decay for a penalty on weights"
            )
        return loss

    def _check_whole(self, leaves: Sequence[Tensor]) -> None:
        """Raise `InvalidInput` if weights among the leaves are this rank's parts of them."""
        read = {id(leaf) for leaf in leaves}
        named = self._model.named_parameters(remove_duplicate=False)
        found = sorted(name for name, each in named if name in self._divided and id(each) in read)
        if found:
            raise InvalidInput(
                f"loss_fn reads weights ({list_some(found, 3)}) of which ranks hold parts, as they "
                "share the last stage; return what the loss needs from the model's forward, use "
                "the optimizer's weight_decay for a penalty on weights, or plan with --tensor 1"
            )


def _leaves_of(loss: Tensor, ends: set[Any]) -> Iterator[Tensor]:
    """Yield the leaves that a loss depends on other than by way of some nodes."""
    pending, seen = [loss.grad_fn], set(ends)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            yield node.variable  # type: ignore[attr-defined]
        pending += [parent for parent, _ in node.next_functions]
