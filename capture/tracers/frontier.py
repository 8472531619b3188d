"""Search for the module frontier: the smallest set of opaque modules around which tracing works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from ...core.errors import CaptureError
from ..observation.forward_observation import ForwardObservation
from ..program.program import Program, is_inside
from ..report import plain_reason

MAX_STEPS = 12
"""Most times the frontier may grow; each step traces the model again."""

MAX_CLASSES = 4
"""Most classes of mode-dependent modules tried one by one, before all are tried together."""


def trace_around(
    model: nn.Module,
    seen: ForwardObservation,
    tracer: Callable[[Mapping[str, str]], Program],
    more: Mapping[str, str],
) -> Program:
    """Trace with as few opaque modules as possible, at least those in ``more``.

    The frontier starts with the modules that the eager forward showed to be untraceable. Each
    failure adds the smallest module that caused it, and all others of its class, which would fail
    alike.

    Raises:
        CaptureError: The model's own ``forward`` is the cause, or growing the frontier did not
            help.
    """
    if "" in seen.reasons:
        raise CaptureError(
            f"forward of the model itself {seen.reasons['']}", module=type(model).__name__
        )
    frontier = keep_outermost({**more, **seen.reasons})
    for _ in range(MAX_STEPS):
        try:
            return tracer(frontier)
        except CaptureError as refusal:
            grown = _grown(model, seen, frontier, refusal)
            if grown == frontier:
                raise
            frontier = grown
    return tracer(frontier)


def propose_mode_suspects(
    model: nn.Module, seen: ForwardObservation, program: Program
) -> Iterator[dict[str, str]]:
    """Yield sets of modules that may explain a difference in evaluation, the likeliest first.

    First those with frozen operations, then those of each class that reads ``self.training``,
    smallest modules first, then all of them.
    """
    readers = {path for path in seen.mode_readers if _was_called(path, seen)} - {""}
    frozen = {path for path in program.frozen_in if path and _was_called(path, seen)}
    classes: dict[type, set[str]] = {}
    for path in readers - set(program.opaque):
        classes.setdefault(type(model.get_submodule(path)), set()).add(path)
    by_size = sorted(
        classes.values(),
        key=lambda paths: max(len(list(model.get_submodule(p).modules())) for p in paths),
    )
    tried: list[set[str]] = []
    for paths in (frozen, *(frozen | alike for alike in by_size[:MAX_CLASSES]), frozen | readers):
        if paths and paths not in tried:
            tried.append(paths)
            yield {path: "looks at self.training" for path in sorted(paths)}


def keep_outermost(reasons: Mapping[str, str]) -> dict[str, str]:
    """Remove the modules that lie inside another one given."""
    return {
        path: reason
        for path, reason in reasons.items()
        if not any(other != path and is_inside(path, other) for other in reasons)
    }


def _grown(
    model: nn.Module, seen: ForwardObservation, frontier: Mapping[str, str], refusal: CaptureError
) -> dict[str, str]:
    paths = {name for name, _ in model.named_modules() if name}
    path = refusal.module or ""
    # Already opaque, or never called by itself (a ModuleList): its parent must be the cause.
    while path in frontier or (path in paths and not _was_called(path, seen)):
        path = path.rpartition(".")[0]
    if path not in paths:
        return dict(frontier)
    reason = f"could not be traced: {plain_reason(str(refusal))}"
    kind = type(model.get_submodule(path))
    written_here = not kind.__module__.startswith("torch.")
    alike = {
        name: reason
        for name, module in model.named_modules()
        if written_here and type(module) is kind and _was_called(name, seen)
    }
    return keep_outermost({**frontier, **alike, path: reason})


def _was_called(path: str, seen: ForwardObservation) -> bool:
    return (path, 0) in seen.calls
