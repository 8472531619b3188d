"""Tracing with ``torch.export`` (non-strict mode)."""

from __future__ import annotations

import functools
import io
import linecache
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...core.errors import CaptureError
from ..observation.forward_observation import TracingTarget
from ..observation.interception import replace_attribute
from ..observation.nested_values import extract_tensors, keep_positions
from ..program.program import CALL, PATH, Program, is_inside
from ..sample import CallStructure
from ..serialize.operations import is_check
from .data_checks import skip_data_checks
from .opaque_calls import find_recurrent_modules, replace_with_opaque_calls, restore_opaque_calls


def trace_with_export(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    """Export a model in its current mode, at exactly this input shape.

    Its custom autograd functions become opaque calls, as do the modules in ``opaque``. An error
    names the module and operation to blame.
    """
    model, structure, seen = subject.model, subject.structure, subject.seen
    functions = [
        function
        for function, paths in seen.functions.items()
        if not all(any(is_inside(path, module) for module in opaque) for path in paths)
    ]
    try:
        with (
            warnings.catch_warnings(),
            silence_loggers("torch"),
            redirect_stderr(io.StringIO()),  # export prints the graph it gave up on
            replace_with_opaque_calls(
                model, seen, {*opaque, *find_recurrent_modules(model, seen)}, functions
            ) as active,
            flatten_call(model, structure) as outputs,
            skip_data_checks() as unchecked,
        ):
            warnings.simplefilter("ignore")
            exported = _export(model, structure, subject.flat)
            module = exported.module()
    except Exception as error:
        raise _refusal(error, model) from error
    # Guards and assertions compare with the sample's values and would keep dead nodes alive.
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
    positional = structure.names if structure.arguments else structure.positional
    placeholders = {**dict(zip(positional, by_position, strict=True)), **by_keyword}
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
        notes=[
            "captured at one batch size; run it at that micro-batch size",
            *([f"does not check its data at {', '.join(unchecked)}"] if unchecked else []),
        ],
    )
    restore_opaque_calls(program, active, opaque, seen)
    return program


def _export(
    model: nn.Module, structure: CallStructure, flat: tuple[Tensor, ...]
) -> torch.export.ExportedProgram:
    """Export a model; if that fails, export the code that it runs when it is not compiled."""
    # With nested arguments the model takes its tensors flat, see `flatten_call`.
    args, kwargs = (flat, {}) if structure.arguments else structure.unflatten(flat)
    # Code that asks torch.compiler.is_compiling() often leaves out what export could trace very
    # well: transformers' LongT5 then makes no attention mask, and fails for the lack of it.
    with _watch_compile_flags(answer=None) as asked:
        try:
            return torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            # torch's own classes of errors mean that it met what it cannot trace.
            if not asked or type(error).__module__ != "builtins":
                raise
    with _watch_compile_flags(answer=False):
        return torch.export.export(model, args, kwargs, strict=False)


@contextmanager
def _watch_compile_flags(answer: bool | None) -> Iterator[list[str]]:
    """Note who asks whether it is compiled, and answer all but torch itself if told to."""
    asked: list[str] = []
    with ExitStack() as replaced:
        for name in ("is_compiling", "is_exporting"):
            written = getattr(torch.compiler, name)

            def flag(written: Any = written) -> bool:
                caller = str(sys._getframe(1).f_globals.get("__name__", ""))
                if caller.partition(".")[0] == "torch":
                    return bool(written())
                asked.append(caller)
                return bool(written()) if answer is None else answer

            replaced.enter_context(replace_attribute(torch.compiler, name, flag))
        yield asked


@contextmanager
def flatten_call(model: nn.Module, structure: CallStructure) -> Iterator[list[Any]]:
    """Make the model return a flat tuple of its output's tensors, and take flat tensors if nested.

    Yields a list to which each call appends its output, with a `TensorPosition` for each tensor.
    """
    # torch.export rejects inputs and outputs of classes that are not registered with pytree, such
    # as the dataclasses of user code.
    written = model.forward
    forms: list[Any] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = structure.unflatten(tensors)
        return forward(*args, **kwargs)

    @functools.wraps(written)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        forms.append(extract_tensors(written(*args, **kwargs), found))
        return tuple(found)

    with replace_attribute(model, "forward", flat if structure.arguments else forward):
        yield forms


def _is_check(node: fx.Node) -> bool:
    is_guard = node.op == "call_module" and node.target == "_guards_fn"
    return is_guard or (node.op == "call_function" and is_check(node))


def _refusal(error: Exception, model: nn.Module) -> CaptureError:
    """Convert an error of torch.export, naming the module and the line that caused it."""
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


def find_source(error: BaseException, model: nn.Module) -> tuple[str, str, str] | None:
    """Return the innermost module whose code raised the error, the place, and the expression."""
    paths = {id(module): name for name, module in model.named_modules()}
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.walk_tb(cause.__traceback__)
        entries = traceback.extract_tb(cause.__traceback__)
        for (frame, _), entry in reversed(list(zip(frames, entries, strict=True))):
            names = frame.f_code.co_varnames
            owner = frame.f_locals.get(names[0]) if names else None
            ours = frame.f_globals.get("__name__", "").startswith("stagewright.")
            if isinstance(owner, nn.Module) and id(owner) in paths and not ours:
                name = paths[id(owner)] or type(model).__name__
                place = f"{PurePath(entry.filename).name}:{entry.lineno}"
                return name, f"{place} in {entry.name}", f"{place}: {_expression(entry)}"
        cause = cause.__cause__ or cause.__context__
    return None


def _expression(entry: traceback.FrameSummary) -> str:
    """Return what was being evaluated, or the whole line where Python does not say more."""
    text = linecache.getline(entry.filename, entry.lineno or 0)
    if entry.end_lineno != entry.lineno or entry.colno is None:
        return text.strip()
    return text.encode()[entry.colno : entry.end_colno].decode() or text.strip()


def _blamed(error: BaseException, model: nn.Module) -> tuple[str | None, str | None]:
    """Return the innermost module whose code raised the error, and the place in that code."""
    if found := find_source(error, model):
        return found[:2]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CaptureError) and cause.module:
            return cause.module, cause.operation
        cause = cause.__cause__ or cause.__context__
    return None, None


@contextmanager
def silence_loggers(prefix: str) -> Iterator[None]:
    """Silence every logger of a name or below it."""
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
