"""Changes of the Python state that modules keep, and which modules they make opaque."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .forward_observation import AttributeChange, ForwardObservation, full_name
from .python_state import (
    ChangeKind,
    classify_change,
    find_tensors,
    get_python_attributes,
    read_contents,
)


class PythonStateTracker:
    """Tracker of every module's Python state, and of whether the module itself changes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {id(module): read_contents(module) for module in model.modules()}
        self._last = dict(self._before)
        self._outside: set[int] = set()

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Attribute changes of the module's state inside to the module itself."""
        self._look(module)
        try:
            yield
        finally:
            if id(module) in self._last:
                self._last[id(module)] = read_contents(module)

    def _look(self, module: nn.Module) -> None:
        if id(module) in self._last and self._last[id(module)] != read_contents(module):
            self._outside.add(id(module))

    def finish(self) -> dict[tuple[str, str], AttributeChange]:
        """Return every change since the beginning, by module path and attribute."""
        found: dict[tuple[str, str], AttributeChange] = {}
        for path, module in self._model.named_modules():
            self._look(module)
            old, new = self._before.get(id(module), {}), read_contents(module)
            for name in sorted({*old, *new}):
                was, now = old.get(name), new.get(name)
                if was != now:
                    outside = bool(path) and id(module) in self._outside
                    tensors = find_tensors(get_python_attributes(module).get(name))
                    losses = sum(t.numel() == 1 and t.grad_fn is not None for t in tensors)
                    kind = classify_change(was, now)
                    found[path, name] = AttributeChange(kind, outside, len(tensors), losses)
        return found


def report_repeated_changes(
    seen: ForwardObservation, again: dict[tuple[str, str], AttributeChange]
) -> None:
    """Blame changes that the second forward repeats; what is created once is a cache."""
    for (path, name), how in again.items():
        # A loss with a graph is for the backward of its own call; no later call can use it.
        if not how.losses or how.losses < how.tensors:
            seen.stateful.setdefault(path, name)
        first = seen.changed.get((path, name))
        if first is None:
            continue
        if how.kind != "object":
            _blame(seen, path, name, first)
        elif how.tensors:
            _blame_tensors(seen, path, name, first)


def report_outside_changes(seen: ForwardObservation, again: dict[str, ChangeKind]) -> None:
    """Record the variables outside the model that the second step changes, too.

    What changes in the first one only is a cache, or a warning given once.
    """
    seen.globals = sorted({*seen.globals, *again})
    seen.counters = sorted(name for name, kind in again.items() if kind in ("state", "drawn"))
    if seen.globals:
        seen.stateful.setdefault("", seen.globals[0])


def report_state_changes(seen: ForwardObservation) -> None:
    """Blame modules for numbers that a single forward changed."""
    for (path, name), how in seen.changed.items():
        if how.kind in ("state", "drawn"):
            seen.stateful.setdefault(path, name)
        if how.kind == "state":
            _blame(seen, path, name, how)


def blame_changes(
    seen: ForwardObservation, changed: dict[tuple[str, str], AttributeChange]
) -> None:
    """Blame or suspect modules for what a first forward changed."""
    # A number that changed is a counter, on which later steps may depend. Any other change may be
    # a cache that is filled once, so the module is only suspected. The root is judged after a
    # second forward: making it opaque would make the model uncuttable.
    for (path, name), how in changed.items():
        if how.kind == "drawn" or (path and how.kind == "state"):
            _blame(seen, path, name, how)
        elif how.losses:
            _blame_tensors(seen, path, name, how)
        elif path:
            seen.suspects.setdefault(path, f"changes {name!r}, which it keeps from call to call")


def _blame_tensors(seen: ForwardObservation, path: str, name: str, how: AttributeChange) -> None:
    # Tracing follows values from inputs to outputs, and would drop what lies beside that path.
    owner = path.rpartition(".")[0] if how.outside else path
    if owner:
        seen.blame(owner, f"leaves a tensor in {full_name(path, name)!r}")
    elif not how.losses:  # opaque, the model could not be cut
        seen.remarks.append(f"a pipeline does not set {full_name(path, name)!r}")


def _blame(seen: ForwardObservation, path: str, name: str, how: AttributeChange) -> None:
    owner, what = ("", f"{name!r} of {path!r}") if how.outside else (path, repr(name))
    seen.blame(owner, f"changes {what}, which it keeps from call to call")
