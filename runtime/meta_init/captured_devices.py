"""Adapt captured code to the device and dtypes it will run with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...capture.captured import Captured
from ...capture.program.program import Program
from ...core.plan.plan import Plan


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
    """Give the tensors that cross the plan's cuts in an uncut model on meta the plan's dtypes.

    Autocast has no effect on the meta device, so values captured there have the weights' dtype.
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
