"""Capture of an ``nn.Module`` and a sample as layers, legal cuts and a graph."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.errors import CaptureError, StagewrightError
from ..core.graph.graph import Graph
from ..core.units import count, list_some
from .captured import Captured, is_compatible, is_cut_alike
from .equivalence.batch_dependence import describe_batch_dependence
from .equivalence.check import (
    IN_FLIGHT,
    EagerReference,
    PiecewiseModel,
    as_capture_error,
    check_piecewise_run,
    follows_mode,
    observe_forward,
    run_eager_steps,
)
from .observation.forward_observation import TracingTarget
from .observation.generation_cache import NOTE, check_no_cache, switch_off_caches
from .observation.preserve import preserve_model
from .program.program import is_inside
from .report import CaptureRecipe, choose_reason, plain_reason
from .sample import check_module, get_integer_ranges, read_sample
from .tracers.export import find_source
from .tracers.frontier import propose_mode_suspects, trace_around
from .tracers.registry import Mode, Tracer, build_captured, select_tracers

_TURN = threading.RLock()
"""Held while a model is observed and traced: functions of torch are replaced meanwhile, for all
threads of the process, and must be restored in the reverse order."""

_as_capture_error = partial(as_capture_error, "tracing failed", StagewrightError)
"""For torch's tracers, which raise errors of every class for code that they do not support."""

REMEDIES = (
    "Move the part that cannot be traced, such as a data-dependent branch, into a submodule (it is "
    "then called as a whole), or out of forward."
)


def capture(model: nn.Module, sample: Any, *, mode: Mode = "auto") -> Graph:
    """Capture a model as a `Graph`; see `trace`."""
    return trace(model, sample, mode=mode).graph


def trace(
    model: nn.Module, sample: Any, *, mode: Mode = "auto", check: bool = True, recipe: str = ""
) -> Captured:
    """Trace a model at one input shape, in training mode.

    An ``nn.Sequential`` becomes its children. Any other model goes through ``torch.export``, and
    if that fails or yields a wrong graph, through ``torch.fx`` symbolic tracing. What a tracer
    would lose, freeze or reject (Python's random numbers, data-dependent branches, hooks) is left
    to the smallest enclosing module, which becomes an opaque call, be it the model as a whole.

    A model whose root is in training mode is traced as it is (frozen submodules stay frozen); one
    in evaluation mode is put in training mode meanwhile. The model itself is not changed.

    Args:
        model: Any module whose inputs and outputs are tensors, or nests of them.
        sample: One micro-batch: an argument, a tuple (positional) or a dict of them (keywords).
        mode: ``auto``, or a single tracer.
        check: Run two training steps of the model and of the traced model, split at every legal
            cut, and compare outputs, gradients and buffers; then compare both in evaluation mode.
            Otherwise the model runs forward once, to be observed.
        recipe: Recipe of an earlier capture (``structure.recipe``), to repeat it exactly.

    Raises:
        InvalidInput: The model does not accept this sample, or fails on it by itself.
        CaptureError: The model cannot be traced correctly; the message names the module, the
            operation and the remedies.
    """
    structure, flat = read_sample(model, sample)
    attempts: list[tuple[str, CaptureError]] = []
    with (
        _TURN,
        preserve_model(model, training=None if model.training else True),
        switch_off_caches(model) as had_cache,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the model's own warnings appear when it is trained
        try:
            expected = run_eager_steps(model, structure, flat) if check else None
            seen = expected.seen if expected else observe_forward(model, structure, flat)
        except CaptureError as error:
            raise _capture_failed(model, [error]) from error
        wanted = CaptureRecipe.from_json(recipe) if recipe else None
        seen.stateful.update(wanted.stateful if wanted else {})
        case = _Case(model, structure, flat, seen, expected, wanted, had_cache)
        for name, tracer in select_tracers(model, flat, wanted.tracer if wanted else mode):
            try:
                captured = _refine(case, tracer)
                captured.inside = _trace_inside(case, captured)
                return _complete(case, name, captured, attempts)
            except CaptureError as refusal:
                attempts.append((name, refusal))
        # An explicit mode asks for that tracer or nothing, and a recipe must reproduce the earlier
        # capture, so neither falls back to one opaque call of the whole model.
        if mode == "auto" and wanted is None and (whole := _capture_opaque(case, attempts)):
            return whole
    raise _capture_failed(model, [refusal for _, refusal in attempts]) from attempts[0][1]


def _trace_inside(case: _Case, captured: Captured) -> Captured | None:
    """Capture the operations inside children that are called whole; None if that cannot be done.

    A recipe says which of both to repeat.
    """
    if captured.program.mode != "sequential" or case.recipe is not None:
        return None
    if not any(_has_operations_inside(child) for child in case.model.children()):
        return None
    ((name, tracer),) = select_tracers(case.model, case.flat, "export")
    try:
        inside = _refine(case, tracer)
    except CaptureError:
        return None
    _keep_recipe(case, name, inside)
    return inside if is_cut_alike(captured, inside) else None


def _has_operations_inside(module: nn.Module) -> bool:
    is_library = type(module).__module__.startswith("torch.nn.")
    return not is_library or next(module.children(), None) is not None


def _capture_opaque(case: _Case, attempts: list[tuple[str, CaptureError]]) -> Captured | None:
    """Capture the whole model as one opaque call, after all tracers failed; None if that fails.

    Raises:
        CaptureError: The model itself does not bear several micro-batches in flight.
    """
    reason = f"could not be taken apart: {choose_reason([str(why) for _, why in attempts])}"
    ((name, tracer),) = select_tracers(case.model, case.flat, "modules")
    try:
        captured = _refine(replace(case, recipe=CaptureRecipe(name, {"": reason})), tracer)
    except CaptureError as refusal:
        if str(refusal).startswith(IN_FLIGHT):
            raise _capture_failed(case.model, [refusal]) from refusal
        return None
    if place := _find_place(case.model, attempts):
        captured.program.notes[0] += f": {reason.partition(': ')[2]}, at {place}"
    captured.program.notes.append(REMEDIES)
    return _complete(case, name, captured, attempts)


def _find_place(model: nn.Module, attempts: list[tuple[str, CaptureError]]) -> str:
    """Return the file, line and expression of the model at which a tracer stopped, or ""."""
    chosen = choose_reason([str(refusal) for _, refusal in attempts])
    telling = [why for _, why in attempts if plain_reason(str(why)) == chosen]
    return next((found[2] for why in telling if (found := find_source(why, model))), "")


def _complete(
    case: _Case, tracer: str, captured: Captured, attempts: list[tuple[str, CaptureError]]
) -> Captured:
    """Add the recipe, the refused attempts and the check to a capture."""
    program = captured.program
    if case.had_cache:
        for path in program.opaque:
            check_no_cache(case.model.get_submodule(path), program.opaque[path])
    _keep_recipe(case, tracer, captured)
    program.sample_ranges = get_integer_ranges(case.flat)
    program.notes += _explain_checkpoints(case.seen.recomputed, program.opaque)
    program.losses = case.seen.losses
    program.notes += case.seen.remarks
    program.notes += [NOTE] if case.had_cache else []
    if program.losses:
        program.notes.append(
            f"forward leaves a number with a gradient in {list_some(program.losses, 3)}, as "
            "auxiliary losses are left; declare it to the pipeline (aux_losses=)"
        )
    captured.attempts = attempts
    if case.expected is not None:
        program.notes += describe_batch_dependence(case.model, case.structure, case.flat)
        inputs = "different inputs" if case.expected.varied else "the same inputs"
        captured.checked = (
            f"equal to the model in two training steps on {inputs}, and in evaluation"
        )
    return captured


def _keep_recipe(case: _Case, tracer: str, captured: Captured) -> None:
    program = captured.program
    recipe = CaptureRecipe(
        tracer,
        program.opaque,
        captured.evaluation is not None,
        dict(program.stateful),
        captured.inside.structure.recipe if captured.inside is not None else "",
    )
    program.structure = replace(case.structure, recipe=recipe.to_json())


def _explain_checkpoints(recomputed: Collection[str], opaque: Collection[str]) -> list[str]:
    """Return a note on the modules whose activation checkpoints are left to the plan, if any."""
    freed = [path for path in recomputed if not any(is_inside(path, other) for other in opaque)]
    if not freed:
        return []
    where = f"of {count(len(freed), 'module')}" if all(freed) else "in the model's own forward"
    return [
        f"activation checkpointing {where} is left to the plan, whose stages recompute if "
        "planned with recompute='auto' or 'always'"
    ]


@dataclass(frozen=True)
class _Case(TracingTarget):
    """A model to capture, and the eager run to compare with."""

    expected: EagerReference | None
    recipe: CaptureRecipe | None
    had_cache: bool


def _refine(case: _Case, tracer: Tracer) -> Captured:
    """Capture with as few opaque modules as possible, adding more if the result is not equal."""
    if case.recipe is not None:
        captured = _trace_and_check(case, tracer, case.recipe.opaque)
        if case.recipe.evaluation:
            _add_evaluation(case, tracer, captured)
        return captured
    # Modules that keep Python state ("suspects") are mostly caches, which may be traced. Only if
    # the traced model turns out different are they made opaque.
    try:
        captured = _trace_and_check(case, tracer, {})
    except CaptureError:
        if case.expected is None or not case.seen.suspects:
            raise
        captured = _trace_and_check(case, tracer, case.seen.suspects)
    if case.expected is None or not captured.program.fixed_mode:
        return captured
    # Evaluation differs. A second graph leaves every layer traced; where the two cannot be cut
    # alike, the modules that read self.training become opaque instead.
    if _add_evaluation(case, tracer, captured):
        return captured
    for suspects in propose_mode_suspects(case.model, case.seen, captured.program):
        try:
            better = _trace_and_check(case, tracer, {**captured.program.opaque, **suspects})
        except CaptureError:
            continue
        if not better.program.fixed_mode:
            return better
    return captured


def _add_evaluation(case: _Case, tracer: Tracer, captured: Captured) -> bool:
    """Capture a separate graph for evaluation; return False if it cannot be cut as this one."""
    program = captured.program
    fixed = program.fixed_mode
    try:
        with _as_capture_error(), preserve_model(case.model, training=False):
            evaluation = build_captured(tracer(case, program.opaque), case.seen)
    except CaptureError:
        return False
    if not is_compatible(captured, evaluation):
        return False
    captured.evaluation, program.fixed_mode = evaluation, ()
    if case.expected is not None and not follows_mode(captured, case.flat):
        captured.evaluation, program.fixed_mode = None, fixed
        return False
    program.notes.append("evaluation runs a graph of its own")
    return True


def _trace_and_check(case: _Case, tracer: Tracer, opaque: Mapping[str, str]) -> Captured:
    """Trace around the opaque modules; raise `CaptureError` unless the result equals the model."""
    with _as_capture_error(), preserve_model(case.model):
        program = (
            tracer(case, opaque)
            if case.recipe is not None
            else trace_around(case.model, case.seen, partial(tracer, case), opaque)
        )
        captured = build_captured(program, case.seen)
    if case.expected is not None:
        with _as_capture_error():
            check_piecewise_run(PiecewiseModel.of(captured), case.expected)
            if not program.fixed_mode and not follows_mode(captured, case.flat):
                program.fixed_mode = ("Python code that looks at self.training",)
    return captured


def _capture_failed(model: nn.Module, refusals: list[CaptureError]) -> CaptureError:
    reasons = "\n  ".join(dict.fromkeys(str(refusal) for refusal in refusals))
    blame = next((refusal.module for refusal in refusals if refusal.module), None)
    operation = next((refusal.operation for refusal in refusals if refusal.operation), None)
    return CaptureError(
        f"{type(model).__name__} could not be captured"
        + (f" because of module {blame!r}" if blame else "")
        + (f" at {operation}" if operation else "")
        + f":\n  {reasons}\n{REMEDIES}",
        module=blame,
        operation=operation,
    )


def default_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU if it has none."""
    check_module(model)
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
