"""Machine code for inner loops where it pays.

numba is optional, and importing it takes a second; so it is loaded on demand, for large work
only. Without it, or with ``STAGEWRIGHT_NUMBA=0`` in the environment, the same function runs as
plain Python and gives the same bits.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

LARGE_STEPS = 500_000
"""Plain Python does about a million steps a second: from here on the import pays at once."""

P = ParamSpec("P")
R = TypeVar("R")


def available() -> bool:
    """Whether numba is installed and not switched off."""
    if os.environ.get("STAGEWRIGHT_NUMBA") == "0":
        return False
    return "numba" in sys.modules or _is_installed()


@cache
def _is_installed() -> bool:
    """Looked up once: it takes half a millisecond."""
    return importlib.util.find_spec("numba") is not None


def worthwhile(steps: int) -> bool:
    """Whether so many steps should run compiled: they are many, or numba is there already."""
    return (steps >= LARGE_STEPS or "numba" in sys.modules) and available()


def prepare(steps: int) -> None:
    """Load numba where so many steps, in many small calls, will pay for it."""
    if worthwhile(steps):
        importlib.import_module("numba")


class Kernel(Generic[P, R]):
    """A function that can be compiled, as a decorator.

    It may index its arguments (one-dimensional arrays), compute, and call what numba knows; it
    writes its results into arguments. Arithmetic is not reordered, so compiled and plain results
    agree bit for bit.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function

    def __call__(self, steps: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run compiled or plain, whichever suits so many steps."""
        if worthwhile(steps):
            return self.compiled(*args, **kwargs)
        return self.plain(*args, **kwargs)

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """The machine code; made or read from numba's cache at the first call."""
        import numba

        try:
            compiled: Any = numba.njit(cache=True)(self.function)
        except RuntimeError:  # nowhere to keep the cache: a read-only home
            compiled = numba.njit(self.function)
        kept: Callable[P, R] = compiled
        return kept

    def plain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """In Python, on lists: indexing those is several times faster than indexing arrays."""
        assert not kwargs, "numba takes arguments by position"
        lists: list[Any] = [
            each.tolist() if isinstance(each, np.ndarray) else each for each in args
        ]
        result = self.function(*lists)  # type: ignore[call-arg]
        for array, values in zip(args, lists, strict=True):
            if isinstance(array, np.ndarray):
                array[:] = values
        return result
