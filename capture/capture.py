"""From an ``nn.Module`` and a sample to layers, cuts and a graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..core.errors import CaptureError, StagewrightError
from ..core.graph.graph import Boundary, Graph
from .captured import Captured
from .equivalence.check import (
    EagerReference,
    check_piecewise_run,
    follows_mode,
    observe_forward,
    run_eager_steps,
)
from .equivalence.evaluation_graph import is_compatible
from .observation.preserve import preserve_model
from .program.segment import Segment
from .report import CaptureRecipe, choose_reason
from .sample import check_module, get_integer_ranges, read_sample
from .tracers.frontier import propose_mode_suspects, trace_around
from .tracers.registry import Mode, Tracer, build_captured, select_tracers
from .tracers.target import TracingTarget

WAYS_OUT = (
    "Ways out: make the module to blame a child of an nn.Sequential (children are called whole, "
    "whatever their Python does), or take the part to blame out of forward."
)


def capture(model: nn.Module, sample: Any, *, mode: Mode = "auto") -> Graph:
    """The model as a `Graph`; see `trace`."""
    return trace(model, sample, mode=mode).graph


def trace(
    model: nn.Module,
    sample: Any,
    *,
    mode: Mode = "auto",
    check: bool = True,
    recipe: str = "",
) -> Captured:
    """Trace a model at one input shape, in training mode.

    An ``nn.Sequential`` becomes its children. Anything else goes through ``torch.export``, and
    where that refuses or would be wrong, through ``torch.fx`` symbolic tracing. What a tracer
    would lose, freeze or refuse (Python's random numbers, branches on data, checkpointing, hooks)
    is left to the smallest module around it, which is called as its author wrote it; if that is
    the model itself, it becomes one opaque layer that cannot be cut.

    A model whose root is in training mode is traced as it stands (frozen submodules stay frozen);
    one in evaluation mode is put in training mode meanwhile. Nothing of the model is changed.

    Args:
        model: Any module whose inputs and outputs are tensors (outputs may be nested).
        sample: One micro-batch: a tensor, a tuple (positional) or a dict (keywords).
        mode: ``auto``, or one of the tracers alone.
        check: Take two steps with the model and with the traced model, cut wherever it may be,
            and compare outputs, gradients and buffers; and both in evaluation mode. Without it
            the model runs forwards once, to be watched.
        recipe: How it was captured before (``structure.recipe``), to capture it the same way.

    Raises:
        InvalidInput: The model does not take this sample, or fails on it by itself.
        CaptureError: It cannot be traced, or would be traced wrongly; the message names the
            module, the operation and the ways out.
    """
    structure, flat = read_sample(model, sample)
    attempts: list[tuple[str, CaptureError]] = []
    with (
        preserve_model(model, training=None if model.training else True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the model gives its own when it is trained
        try:
            expected = run_eager_steps(model, structure, flat) if check else None
            seen = expected.seen if expected else observe_forward(model, structure, flat)
        except CaptureError as error:
            raise _could_not(model, [error]) from error
        wanted = CaptureRecipe.from_json(recipe) if recipe else None
        case = _Case(model, structure, flat, seen, expected, wanted)
        for name, tracer in select_tracers(model, flat, wanted.tracer if wanted else mode):
            try:
                captured = _refined(case, tracer)
            except CaptureError as refusal:
                attempts.append((name, refusal))
            else:
                return _described(case, name, captured, attempts)
        refused = _could_not(model, [refusal for _, refusal in attempts])
        if mode == "auto" and wanted is None:
            reason = f"could not be taken apart: {choose_reason([str(why) for _, why in attempts])}"
            ((name, tracer),) = select_tracers(model, flat, "modules")
            with suppress(CaptureError):
                captured = _refined(replace(case, recipe=CaptureRecipe(name, {"": reason})), tracer)
                captured.program.notes.append(WAYS_OUT)
                return _described(case, name, captured, attempts)
    raise refused from attempts[0][1]


def _described(
    case: _Case, tracer: str, captured: Captured, attempts: list[tuple[str, CaptureError]]
) -> Captured:
    """Add what only the whole story of the capture tells."""
    program = captured.program
    recipe = CaptureRecipe(tracer, program.opaque, captured.evaluation is not None).to_json()
    program.structure = replace(case.structure, recipe=recipe)
    program.sample_ranges = get_integer_ranges(case.flat)
    program.notes += case.seen.remarks
    captured.attempts, captured.checked = attempts, describe_check(case.expected)
    return captured


@dataclass(frozen=True)
class _Case(TracingTarget):
    """What is captured, and what it is held against."""

    expected: EagerReference | None
    recipe: CaptureRecipe | None


def _refined(case: _Case, tracer: Tracer) -> Captured:
    """Capture with what must stay as written; then with more of it, where that is not equal."""
    if case.recipe is not None:
        captured = _accepted(case, tracer, case.recipe.opaque)
        if case.recipe.evaluation:
            _add_evaluation(case, tracer, captured)
        return captured
    try:
        captured = _accepted(case, tracer, {})
    except CaptureError:
        if case.expected is None or not case.seen.suspects:
            raise
        captured = _accepted(case, tracer, case.seen.suspects)
    if case.expected is None or not captured.program.fixed_mode:
        return captured
    for suspects in propose_mode_suspects(case.model, case.seen, captured.program):
        try:
            better = _accepted(case, tracer, {**captured.program.opaque, **suspects})
        except CaptureError:
            continue
        if not better.program.fixed_mode:
            return better
    _add_evaluation(case, tracer, captured)
    return captured


def _add_evaluation(case: _Case, tracer: Tracer, captured: Captured) -> None:
    """Give evaluation a graph of its own, if it can be cut where the training graph is."""
    program = captured.program
    fixed = program.fixed_mode
    try:
        with _as_capture_error(), preserve_model(case.model, training=False):
            evaluation = build_captured(tracer(case, program.opaque))
    except CaptureError:
        return
    if not is_compatible(captured, evaluation):
        return
    captured.evaluation, program.fixed_mode = evaluation, ()
    if case.expected is not None and not _follows(captured, case.expected):
        captured.evaluation, program.fixed_mode = None, fixed
        return
    program.notes.append("evaluation runs a graph of its own")


def _accepted(case: _Case, tracer: Tracer, opaque: Mapping[str, str]) -> Captured:
    """Trace around these modules, and compare with the model if there is something to compare.

    Raises:
        CaptureError: It could not be traced, or is not equal.
    """
    with _as_capture_error(), preserve_model(case.model):
        if case.recipe is not None:
            program = tracer(case, opaque)
        else:
            program = trace_around(case.model, case.seen, partial(tracer, case), opaque)
        captured = build_captured(program)
    if case.expected is not None:
        with _as_capture_error():
            _check(captured, case.expected)
    return captured


@contextmanager
def _as_capture_error() -> Iterator[None]:
    """Whatever a tracer stumbles over is a refusal, not a bug of the caller's."""
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CaptureError(
            f"tracing failed: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error


def _check(captured: Captured, expected: EagerReference) -> None:
    """The gate: the traced model, in as many pieces as it can be cut into, is the model."""
    program = captured.program
    check_piecewise_run(program.model, *_pieces(captured), captured.unflatten_output, expected)
    if not program.fixed_mode and not _follows(captured, expected):
        program.fixed_mode = ("Python code that looks at self.training",)


def _follows(captured: Captured, expected: EagerReference) -> bool:
    model, structure = captured.program.model, captured.structure
    unflatten, flat = captured.unflatten_output, expected.inputs[0]
    return follows_mode(model, structure, *_pieces(captured), unflatten, flat)


def _pieces(captured: Captured) -> tuple[list[Segment], list[Boundary]]:
    """The traced model cut wherever it may be, and what crosses those cuts."""
    legal = [cut.boundary.after + 1 for cut in captured.cuts if cut.boundary.legal]
    edges = [0, *legal, len(captured.layers)]
    pieces = [captured.segment(first, last) for first, last in pairwise(edges)]
    return pieces, [captured.cuts[position - 1].boundary for position in legal]


def _could_not(model: nn.Module, refusals: list[CaptureError]) -> CaptureError:
    reasons = "\n  ".join(dict.fromkeys(str(refusal) for refusal in refusals))
    blame = next((refusal.module for refusal in refusals if refusal.module), None)
    operation = next((refusal.operation for refusal in refusals if refusal.operation), None)
    return CaptureError(
        f"{type(model).__name__} could not be captured"
        + (f"; the module to blame is {blame!r}" if blame else "")
        + (f" at {operation}" if operation else "")
        + f":\n  {reasons}\n{_cache_off(model)}{WAYS_OUT}",
        module=blame,
        operation=operation,
    )


def _cache_off(model: nn.Module) -> str:
    """The way out for language models of transformers, which hand a cache on unless told."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return ""
    return (
        "Its configuration has use_cache=True, which is of use for generation alone: make it with "
        "use_cache=False, or set model.config.use_cache = False. "
    )


def describe_check(expected: EagerReference | None) -> str:
    if expected is None:
        return "not compared with the model"
    inputs = "different inputs" if expected.varied else "the same inputs"
    return f"equal to the model in two steps of training on {inputs}, and in evaluation"


def default_device(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the CPU if it has none.

    Raises:
        InvalidInput: It is no module.
    """
    check_module(model)
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
