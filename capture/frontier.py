"""The module frontier: which modules are called as their author wrote them, found step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ..core.errors import CaptureError
from .observe import Observation
from .program import Program, is_inside

MAX_STEPS = 12
"""Times the frontier may grow before capture gives up; each step traces the model anew."""


def trace_around(
    model: nn.Module, seen: Observation, tracer: Callable[[Mapping[str, str]], Program]
) -> Program:
    """Trace with as few opaque modules as it takes.

    It starts with what one eager forward showed must stay as written. Each refusal adds the
    smallest module it blames, and every other of the same class, which would be refused alike.

    Args:
        model: The model.
        seen: What its eager forward showed.
        tracer: Traces around the modules given by path.

    Raises:
        CaptureError: The model's own ``forward`` is to blame, or growing the frontier did not help.
    """
    if "" in seen.reasons:
        raise CaptureError(
            f"forward of the model itself {seen.reasons['']}", module=type(model).__name__
        )
    frontier = outermost(seen.reasons)
    for _ in range(MAX_STEPS):
        try:
            return tracer(frontier)
        except CaptureError as refusal:
            grown = _grown(model, seen, frontier, refusal)
            if grown == frontier:
                raise
            frontier = grown
    return tracer(frontier)


def outermost(reasons: Mapping[str, str]) -> dict[str, str]:
    """Without the modules that lie inside another one named."""
    return {
        path: reason
        for path, reason in reasons.items()
        if not any(other != path and is_inside(path, other) for other in reasons)
    }


def _grown(
    model: nn.Module, seen: Observation, frontier: Mapping[str, str], refusal: CaptureError
) -> dict[str, str]:
    paths = {name for name, _ in model.named_modules() if name}
    path = refusal.module or ""
    while path in frontier or (path in paths and not _was_called(path, seen)):
        path = path.rpartition(".")[0]
    if path not in paths:
        return dict(frontier)
    reason = f"could not be traced ({str(refusal).removeprefix('torch.export: ')})"
    kind = type(model.get_submodule(path))
    written_here = not kind.__module__.startswith("torch.")
    alike = {
        name: reason
        for name, module in model.named_modules()
        if written_here and type(module) is kind and _was_called(name, seen)
    }
    return outermost({**frontier, **alike, path: reason})


def _was_called(path: str, seen: Observation) -> bool:
    return (path, 0) in seen.calls
