"""Check that traced layers stay right in another precision than they were captured in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, fx, nn

from ...capture.capture import default_device, trace
from ...capture.captured import Captured
from ...capture.program.program import FUNCTION, VALUE
from ...capture.sample import dtype_name
from ...core.errors import CaptureError, PlanMismatch
from ...core.units import list_some

CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)

Precision = tuple[torch.dtype | None, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]
"""Dtypes of autocast (`None` where it is off), of all weights and buffers, and of all inputs."""


class PrecisionCheck:
    """Check of a model whose precision changes after its capture, in one process.

    Traced layers keep what forward derived from a dtype: the branch it took, the limits of
    ``torch.finfo``, the dtype it converted to. So a model that is converted, or run under another
    autocast, is traced again in its new precision, and its graph has to be the one that runs.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        inputs = tuple(getattr(torch, spec.dtype) for spec in captured.graph.inputs)
        self._known = {_precision_of(captured.program.model, inputs)}

    def run(self, microbatch: Sequence[Tensor]) -> None:
        """Check the precision of a micro-batch; each is traced once.

        Raises:
            PlanMismatch: Forward does something else in it, or cannot be traced in it.
        """
        captured = self._captured
        model, structure = captured.program.model, captured.structure
        now = _precision_of(model, [tensor.dtype for tensor in microbatch])
        if now in self._known:
            return
        sample = structure.as_sample(tensor.detach().clone() for tensor in microbatch)
        try:
            again = trace(model, sample, check=False, recipe=structure.recipe)
        except CaptureError as error:
            raise PlanMismatch(f"{_describe(now)}, where it cannot be captured: {error}") from error
        difference = _find_difference(captured, again)
        if difference:
            raise PlanMismatch(
                f"{_describe(now)}, where its forward does something other than what was captured: "
                f"{difference}. Convert the model before the pipeline is built, with a sample= of "
                "its inputs' types, and build it inside of the torch.autocast that it runs under"
            )
        self._known.add(now)


def _precision_of(model: nn.Module, inputs: Sequence[torch.dtype]) -> Precision:
    kind = default_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        autocast,
        tuple(each.dtype for each in (*model.parameters(), *model.buffers())),
        tuple(inputs),
    )


def _describe(now: Precision) -> str:
    autocast, weights, inputs = now
    held, given = (list_some(sorted(map(dtype_name, {*each})), 3) for each in (weights, inputs))
    under = "without autocast" if autocast is None else f"under autocast to {dtype_name(autocast)}"
    return f"the model runs with weights of {held}, inputs of {given} and {under} now"


def _find_difference(ours: Captured, theirs: Captured) -> str:
    """Return the first operation that differs between two captures of a model; empty if none."""
    pairs = [(ours, theirs)]
    if (ours.evaluation is None) != (theirs.evaluation is None):
        return "evaluation has a graph of its own in one of them alone"
    if ours.evaluation is not None and theirs.evaluation is not None:
        pairs.append((ours.evaluation, theirs.evaluation))
    for one, other in pairs:
        for was, now in zip_longest(
            _operations_of(one), _operations_of(other), fillvalue="nothing"
        ):
            if was != now:
                return f"{was} was captured, now there is {now}"
    return ""


def _operations_of(captured: Captured) -> list[str]:
    """Return the operations in order with their arguments, constants among them.

    Conversions between floating dtypes are left out: that of the capture keeps more digits, or
    its result meets another dtype, which operations refuse.
    """
    numbers: dict[fx.Node, str] = {}
    found: list[str] = []
    for node in captured.program.graph.nodes:
        converted = _converted_by(node)
        if converted is not None:
            numbers[node] = numbers[converted]
            continue
        numbers[node] = f"%{len(found)}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        # Functions made anew in each trace, as those of custom derivatives, differ by address.
        target = node.meta.get(FUNCTION) or node.target
        found.append(f"{numbers[node]} = {target}{args}{kwargs or ''}")
    return found


def _converted_by(node: fx.Node) -> fx.Node | None:
    """Return the node that this one only converts from a floating dtype to another, if so."""
    if node.target not in CONVERSIONS or not isinstance(node.args[0], fx.Node):
        return None
    values = (node.args[0].meta.get(VALUE), node.meta.get(VALUE))
    is_floating = all(isinstance(each, Tensor) and each.is_floating_point() for each in values)
    return node.args[0] if is_floating else None
