"""Let captured code be as if it had been captured where it will run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...capture.captured import Captured
from ...capture.program.program import Program
from ...core.plan.plan import Plan


def replace_device(captured: Captured, device: torch.device, *, instead_of: torch.device) -> None:
    """Rewrite position ids, masks and the like that the model makes where its weights are.

    Capture writes down the device that they were made on; on another one, and above all on the
    meta device, a stage would make them in the wrong place.

    Args:
        captured: Before it is cut; changed in place.
        device: Where the stages will run.
        instead_of: Where the model was captured.
    """
    if device == instead_of:
        return
    programs = [captured.program]
    if captured.evaluation is not None:
        programs.append(captured.evaluation.program)
    for program in programs:
        _rewrite(program.graph, program, device, instead_of)


def apply_planned_dtypes(captured: Captured, plan: Plan) -> None:
    """Let what crosses the plan's cuts have the plan's dtypes.

    Autocast does nothing on the meta device, so what was captured there is of the weights' dtype.

    Args:
        captured: On the meta device, of the planned shapes, before it is cut; changed in place.
        plan: Made from a profile under the autocast it will run under, if any.
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
    def elsewhere(value: Any) -> Any:
        is_old = isinstance(value, torch.device) and value.type == instead_of.type
        return device if is_old else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, elsewhere)
        node.kwargs = fx.node.map_aggregate(node.kwargs, elsewhere)
        if node.op == "get_attr":
            body = program.attribute(str(node.target))
            if isinstance(body, fx.GraphModule):  # a region under no_grad or autocast
                _rewrite(body.graph, program, device, instead_of)
                body.recompile()
