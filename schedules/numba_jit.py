"""Just-in-time compilation of inner loops with numba.

numba is optional, and importing it takes a second, so it is only loaded for large inputs. Without
it, or with ``STAGEWRIGHT_NUMBA=0`` in the environment, functions run as plain Python with results
that are equal bit for bit.
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
"""Plain Python runs about a million steps a second: from here on importing numba pays at once."""

P = ParamSpec("P")
R = TypeVar("R")


def is_available() -> bool:
    """Return True if numba is installed and not switched off."""
    if os.environ.get("STAGEWRIGHT_NUMBA") == "0":
        return False
    return "numba" in sys.modules or _is_installed()


@cache
def _is_installed() -> bool:
    # Cached: the look-up takes half a millisecond.
    return importlib.util.find_spec("numba") is not None


def is_worthwhile(steps: int) -> bool:
    """Return True if numba is available, and either loaded already or worth loading."""
    return (steps >= LARGE_STEPS or "numba" in sys.modules) and is_available()


def load_if_worthwhile(steps: int) -> None:
    """Load numba if that pays for this total of steps, spread over many small calls."""
    if is_worthwhile(steps):
        importlib.import_module("numba")


class Kernel(Generic[P, R]):
    """Decorator for a function to run compiled on large inputs and as plain Python on small ones.

    The function may index its arguments (one-dimensional arrays), compute, and call what numba
    supports; it writes its results into arguments. ``fastmath`` is off, so arithmetic is not
    reordered, and compiled and plain results agree bit for bit.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function

    def __call__(self, steps: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run compiled or plain, whichever is faster for this number of steps."""
        if is_worthwhile(steps):
            return self.compiled(*args, **kwargs)
        return self.plain(*args, **kwargs)

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """Return the compiled function; the first call compiles it or reads numba's cache."""
        import numba

        try:
            compiled: Any = numba.njit(cache=True)(self.function)
        except RuntimeError:  # no writable place for the cache, such as with a read-only home
            compiled = numba.njit(self.function)
        kept: Callable[P, R] = compiled
        return kept

    def plain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run as plain Python."""
        assert not kwargs, "numba takes arguments by position"
        # Indexing a list is several times faster than indexing an array.
        lists: list[Any] = [
            each.tolist() if isinstance(each, np.ndarray) else each for each in args
        ]
        result = self.function(*lists)  # type: ignore[call-arg]
        for array, values in zip(args, lists, strict=True):
            if isinstance(array, np.ndarray):
                array[:] = values
        return result
