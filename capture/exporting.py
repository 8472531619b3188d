"""Capture through ``torch.export`` (non-strict): whole models, written as they are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..core.errors import CaptureError
from .program import CALL, PATH, Program
from .quiet import quiet_loggers
from .sample import CallStructure

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def export_program(model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]) -> Program:
    """Export in the mode the model is in, at exactly this input shape.

    Raises:
        CaptureError: Export refused the model; the message names the module and operation.
    """
    args, kwargs = structure.unflatten(flat)
    try:
        with warnings.catch_warnings(), quiet_loggers("torch"):
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, args, kwargs, strict=False)
            module = exported.module()
    except Exception as error:
        raise _refusal(error) from error
    for node in list(module.graph.nodes):
        if _is_check(node):
            module.graph.erase_node(node)
    graph = fx.Graph()  # with no owner, so that names may point at the model's own modules
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for key, (path, _) in stack.items():
            node.meta[PATH], node.meta[CALL] = path, key
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    by_position, by_keyword = pytree.tree_unflatten(nodes, exported.call_spec.in_spec)
    placeholders = {**dict(zip(structure.positional, by_position, strict=True)), **by_keyword}
    return Program(
        model=model,
        holder=module,
        graph=graph,
        mode="export",
        structure=structure,
        inputs=[placeholders[name] for name in structure.names],
        out_spec=exported.call_spec.out_spec,
        training=model.training,
        notes=["captured at one batch size; run it at that micro-batch size"],
    )


def _is_check(node: fx.Node) -> bool:
    if node.op == "call_module" and node.target == "_guards_fn":
        return True
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and not node.users and name.split(".")[0] in _CHECKS


def _refusal(error: Exception) -> CaptureError:
    """Say which line of which module was refused, in a few words."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    headline = lines[0] if lines else type(error).__name__
    module = None
    for frame in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            module = type(owner).__name__
            operation = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            break
    else:
        operation = None
    where = re.search(r"(\S+\.py:\d+ in \w+)", text)
    return CaptureError(
        f"torch.export: {type(error).__name__}: {headline}",
        module=module,
        operation=operation or (where[1] if where else None),
    )


def _frames(error: BaseException) -> list[FrameType]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]
