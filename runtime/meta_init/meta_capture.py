"""Capture of a model on the meta device, and its adaptation to the device it will run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ...capture.captured import Captured
from ...capture.program.program import Program
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from .tensor_slots import empty_like, list_tensors
from .weights import Weights


def is_on_meta(model: nn.Module) -> bool:
    """Return True if any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_weights(model: nn.Module, weights: Weights | None) -> None:
    """Check that values are given for a model on meta, and for no other."""
    if is_on_meta(model) and weights is None:
        raise InvalidInput(
            "this model is on the meta device; pass weights=Weights(checkpoint=path) to load its "
            "values, or Weights(seed=0) to initialise them"
        )
    if not is_on_meta(model) and weights is not None:
        raise InvalidInput(
            "weights= is for a model on the meta device, but this one has values; build it under "
            "torch.device('meta'), or omit weights= and use load_checkpoint"
        )


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace buffers that have values by meta tensors while the model is captured.

    Capture needs all tensors on one device. A table that the model's author computed on the CPU is
    put back afterwards.
    """
    real = [
        (slot, each.tensor)
        for each in list_tensors(model)
        if not each.tensor.is_meta
        for slot in each.slots
    ]
    try:
        for slot, tensor in real:
            slot.put(empty_like(tensor, torch.device("meta")))
        yield
    finally:
        for slot, tensor in real:
            slot.put(tensor)


def replace_device(captured: Captured, device: torch.device, *, instead_of: torch.device) -> None:
    """Replace the device of tensors that the model creates, such as position ids and masks.

    Capture records the device on which they were created. A model captured elsewhere, above all on
    the meta device, would create them there and not where its stages run.

    The captured model is changed in place, before it is cut.
    """
    if device == instead_of:
        return
    programs = [captured.program]
    if captured.evaluation is not None:
        programs.append(captured.evaluation.program)
    for program in programs:
        _rewrite(program.graph, program, device, instead_of)


def apply_planned_dtypes(captured: Captured, plan: Plan) -> None:
    """Give the tensors that cross the plan's cuts in an uncut model the plan's dtypes.

    For a model captured on another type of device than it runs on: autocast has no effect on meta,
    and leaves LayerNorm in bfloat16 on the CPU, where CUDA gives float32.
    """
    after = 0
    for count, planned in zip(plan.balance, plan.boundaries, strict=False):
        after += count
        found = captured.cuts[after - 1]
        tensors = tuple(
            ours.model_copy(update={"dtype": theirs.dtype})
            for ours, theirs in zip(found.boundary.tensors, planned.tensors, strict=True)
        )
        boundary = found.boundary.model_copy(update={"tensors": tensors})
        captured.cuts[after - 1] = replace(found, boundary=boundary)


def _rewrite(
    graph: fx.Graph, program: Program, device: torch.device, instead_of: torch.device
) -> None:
    def replace_in(value: Any) -> Any:
        is_old = isinstance(value, torch.device) and value.type == instead_of.type
        return device if is_old else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, replace_in)
        node.kwargs = fx.node.map_aggregate(node.kwargs, replace_in)
        if node.op == "get_attr":
            body = program.attribute(str(node.target))
            if isinstance(body, fx.GraphModule):  # a region under no_grad or autocast
                _rewrite(body.graph, program, device, instead_of)
                body.recompile()
