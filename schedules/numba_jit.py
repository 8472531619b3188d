"""Just-in-time compilation of inner loops with numba.

numba is optional, and importing it takes a second, so it is only loaded for large inputs. Without
it, or with ``STAGEWRIGHT_NUMBA=0`` in the environment, functions run as plain Python with results
that are equal bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

LARGE_STEPS = 500_000
"""Plain Python runs about a million steps a second: from here on importing numba pays at once."""

P = ParamSpec("P")
R = TypeVar("R")

_postponed = threading.Event()


def postpone() -> None:
    """Run everything as plain Python until `resume`, while another process compiles."""
    _postponed.set()


def resume() -> None:
    """Use numba again, also in the middle of a search: results are equal bit for bit."""
    _postponed.clear()


def is_available() -> bool:
    """Return True if numba is installed, and neither switched off nor postponed."""
    if os.environ.get("STAGEWRIGHT_NUMBA") == "0" or _postponed.is_set():
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


def int_zeros(count: int) -> NDArray[np.int64]:
    """Return a column of zeros: a list in plain Python, an array in compiled code."""
    return [0] * count  # type: ignore[return-value]


def float_zeros(count: int) -> NDArray[np.float64]:
    """Return a column of zeros: a list in plain Python, an array in compiled code."""
    return [0.0] * count  # type: ignore[return-value]


class Kernel(Generic[P, R]):
    """Decorator for a function to run compiled on large inputs and as plain Python on small ones.

    The function may index its arguments (arrays and NamedTuples of arrays), compute, and call what
    numba supports and functions of its own package. It returns its results, or writes them into
    arguments that are one-dimensional arrays. ``fastmath`` is off, so arithmetic is not reordered,
    and compiled and plain results agree bit for bit.
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

        function: Any = self.function
        callees = _find_callees(function)
        for callee in callees:
            _register(callee)
        # numba renews what it has cached for a function when that function's file changes. A name
        # that depends on all files does so when any of those that it calls is in changes. Index
        # files of the names before stay in `__pycache__`: numba deletes none, and they do no harm.
        files = sorted({each.__code__.co_filename for each in callees})
        try:
            sources = b"".join(Path(file).read_bytes() for file in files)
            function.__qualname__ = f"{function.__name__}_{crc32(sources):08x}"
            compiled: Any = numba.njit(cache=True)(function)
        except (RuntimeError, OSError):  # no writable cache, such as with a read-only home
            compiled = numba.njit(function)
        kept: Callable[P, R] = compiled
        return kept

    def plain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run as plain Python."""
        assert not kwargs, "numba takes arguments by position"
        # Indexing a list is several times faster than indexing an array.
        lists: list[Any] = [_as_lists(each) for each in args]
        result = self.function(*lists)  # type: ignore[call-arg]
        for array, values in zip(args, lists, strict=True):
            if isinstance(array, np.ndarray):
                array[:] = values
        return result


def _as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):  # a NamedTuple
        return type(value)(*map(_as_lists, value))
    return value


def _find_callees(function: FunctionType) -> set[FunctionType]:
    """Return the functions of its own package that a function calls, directly or through others."""
    package, found, waiting = function.__module__.rpartition(".")[0], set(), [function]
    while waiting:
        caller = waiting.pop()
        for name in caller.__code__.co_names:
            called = caller.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__.startswith(
                (package, __name__)
            ):
                assert not _returns_numbers(caller) or _returns_numbers(called), (caller, called)
                if called not in found:
                    found.add(called)
                    waiting.append(called)
    return found


@cache
def _register(function: FunctionType) -> None:
    """Let compiled code call a function; once, as numba would keep and try every registration.

    Doing that by decorators would load numba at import, even where no kernel is ever compiled.
    """
    from numba import extending

    if function in (int_zeros, float_zeros):
        dtype = np.int64 if function is int_zeros else np.float64
        extending.overload(function)(lambda count: lambda count: np.zeros(count, dtype))
    else:
        # Inlined, as a call passes every array of its NamedTuples: hundreds of words on the stack.
        is_plain = _returns_numbers(function)
        extending.register_jitable(_nrt=not is_plain, forceinline=is_plain)(function)


def _returns_numbers(function: FunctionType) -> bool:
    """Return True if a function returns no array, so that it need not count references.

    numba counts references to every array passed, also those in NamedTuples: tens of atomic
    operations for a function that computes for a few nanoseconds. The caller holds the arrays
    while such a function runs. It cannot return or replace an array without counting, hence it
    may only call functions of its kind; allocating columns in one does not compile.
    """
    return _is_number(get_type_hints(function)["return"])


def _is_number(kind: Any) -> bool:
    if isinstance(kind, type) and hasattr(kind, "_fields"):  # a NamedTuple
        return all(map(_is_number, get_type_hints(kind).values()))
    if get_origin(kind) is tuple:
        return all(map(_is_number, get_args(kind)))
    return kind in (int, float, bool, type(None))
