"""Detection of the modules that read ``self.training`` while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _Watched:
    """A descriptor for ``training`` that records its readers and leaves the value in place."""

    def __init__(self, paths: dict[int, str], readers: set[str]) -> None:
        self._paths, self._readers = paths, readers

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if id(module) in self._paths:
            self._readers.add(self._paths[id(module)])
        return vars(module)["training"]

    def __set__(self, module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value


@contextmanager
def watch_mode_reads(model: nn.Module) -> Iterator[set[str]]:
    """Collect the paths of the modules whose mode is read inside, except torch's own modules."""
    # A data descriptor on the class takes precedence over the instance's attribute, so the modules
    # themselves need not be changed. torch's own modules are handled by the tracers.
    readers: set[str] = set()
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    classes: set[Any] = {
        type(module)
        for module in model.modules()
        if not type(module).__module__.startswith("torch.") and "training" not in vars(type(module))
    }
    watched = _Watched(paths, readers)
    try:
        for kind in classes:
            kind.training = watched
        yield readers
    finally:
        for kind in classes:
            if vars(kind).get("training") is watched:
                del kind.training
