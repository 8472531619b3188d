"""Capture through ``torch.export`` (non-strict): whole models, written as they are."""

from __future__ import annotations

import functools
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...core.errors import CaptureError
from ..observation.nested_values import extract_tensors, keep_positions
from ..program.program import CALL, PATH, Program, is_inside
from .opaque_calls import find_recurrent_modules, replace_with_opaque_calls, restore_opaque_calls
from .target import TracingTarget

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def trace_with_export(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    """Export in the mode the model is in, at exactly this input shape.

    Args:
        subject: The model; its custom autograd functions are called as written.
        opaque: Modules that are called as their author wrote them, and why.

    Raises:
        CaptureError: Export refused the model; the message names the module and operation.
    """
    model, structure, seen = subject.model, subject.structure, subject.seen
    args, kwargs = structure.unflatten(subject.flat)
    functions = [cls for cls, paths in seen.functions.items() if not _all_inside(paths, opaque)]
    try:
        with (
            warnings.catch_warnings(),
            silence_loggers("torch"),
            redirect_stderr(io.StringIO()),  # export prints the graph it gave up on
            replace_with_opaque_calls(
                model, seen, {*opaque, *find_recurrent_modules(model, seen)}, functions
            ) as active,
            flatten_output(model) as outputs,
        ):
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, args, kwargs, strict=False)
            module = exported.module()
    except Exception as error:
        raise _refusal(error, model) from error
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
    program = Program(
        model=model,
        holder=module,
        graph=graph,
        mode="export",
        structure=structure,
        inputs=[placeholders[name] for name in structure.names],
        out_spec=pytree.tree_flatten(keep_positions(outputs[-1]))[1],
        training=model.training,
        output=outputs[-1],
        opaque=dict(opaque),
        notes=["captured at one batch size; run it at that micro-batch size"],
    )
    restore_opaque_calls(program, active, opaque, seen)
    return program


@contextmanager
def flatten_output(model: nn.Module) -> Iterator[list[Any]]:
    """Make the model return a tuple of its output's tensors for a while, whatever holds them.

    Yields the list that each call's output is appended to, with places for the tensors.
    """
    written, had_own = model.forward, "forward" in vars(model)
    forms: list[Any] = []

    @functools.wraps(written)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        forms.append(extract_tensors(written(*args, **kwargs), found))
        return tuple(found)

    try:
        model.forward = forward
        yield forms
    finally:
        if had_own:
            model.forward = written
        else:
            del model.forward


def _all_inside(paths: set[str], opaque: Mapping[str, str]) -> bool:
    return all(any(is_inside(path, module) for module in opaque) for path in paths)


def _is_check(node: fx.Node) -> bool:
    if node.op == "call_module" and node.target == "_guards_fn":
        return True
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and not node.users and name.split(".")[0] in _CHECKS


def _refusal(error: Exception, model: nn.Module) -> CaptureError:
    """Say which line of which module was refused, in a few words."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    headline = lines[0] if lines else type(error).__name__
    where = re.search(r"(\S+\.py:\d+ in \w+)", text)
    module, operation = _blamed(error, model)
    return CaptureError(
        f"torch.export: {type(error).__name__}: {headline}",
        module=module,
        operation=operation or (where[1] if where else None),
    )


def _blamed(error: BaseException, model: nn.Module) -> tuple[str | None, str | None]:
    """The innermost module of the model in whose code the error arose, and the line there."""
    paths = {id(module): name for name, module in reversed(list(model.named_modules()))}
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in _frames(cause):
            names = frame.f_code.co_varnames
            owner = frame.f_locals.get(names[0]) if names else None
            if isinstance(owner, nn.Module) and id(owner) in paths:
                name = paths[id(owner)] or type(model).__name__
                return name, f"{frame.f_code.co_name}, line {line}"
        if isinstance(cause, CaptureError) and cause.module:
            return cause.module, cause.operation
        cause = cause.__cause__ or cause.__context__
    return None, None


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


@contextmanager
def silence_loggers(prefix: str) -> Iterator[None]:
    """Silence every logger of that name or below it, for a while."""
    found = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name == prefix or name.startswith(f"{prefix}.")
    ]
    before = [logger.disabled for logger in found]
    for logger in found:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(found, before, strict=True):
            logger.disabled = disabled
