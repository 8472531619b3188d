"""The module frontier: which modules are called as their author wrote them, found step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from ...core.errors import CaptureError
from ..observation.observe import ForwardObservation
from ..program.program import Program, is_inside
from ..report import plain_reason

MAX_STEPS = 12
"""Times the frontier may grow before capture gives up; each step traces the model anew."""

MAX_CLASSES = 4
"""Classes tried one by one for code that looks at the mode, before all are taken together."""


def trace_around(
    model: nn.Module,
    seen: ForwardObservation,
    tracer: Callable[[Mapping[str, str]], Program],
    more: Mapping[str, str],
) -> Program:
    """Trace with as few opaque modules as it takes.

    It starts with what one eager forward showed must stay as written. Each refusal adds the
    smallest module it blames, and every other of the same class, which would be refused alike.

    Args:
        model: The model.
        seen: What its eager forward showed.
        tracer: Traces around the modules given by path.
        more: Modules that are to stay as written besides, and why.

    Raises:
        CaptureError: The model's own ``forward`` is to blame, or growing the frontier did not help.
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
    """Modules that may be why evaluation is not followed, the likeliest first.

    First those whose operations are frozen, then every class of modules that looked at
    ``self.training``, the smallest first, then all of them.
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
    """Without the modules that lie inside another one named."""
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
