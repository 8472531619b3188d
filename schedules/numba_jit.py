"""Just-in-time compilation of inner loops with numba.

numba is optional. Loading it takes a second and compiling a kernel that is not in its cache ten, so
either is done only once plain Python has taken about as long, and never where a deadline is nearer
than that. Without numba, or with ``STAGEWRIGHT_NUMBA=0`` in the environment, functions run as plain
Python with results that are equal bit for bit; with ``STAGEWRIGHT_NUMBA=1`` always compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import (
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DeadlineExceeded

STEPS_PER_S = 1_000_000
"""Steps that plain Python runs in a second, roughly."""

LOAD_S = 0.4
"""Time spent in plain Python from which loading numba and cached kernels pays: it takes 0.7 s."""

COMPILE_S = 10.0
"""Time spent in a kernel's plain Python from which compiling it pays."""

COMPILED_SPEED = 50
"""Times as many steps that compiled code runs in a second."""

LATE_S = 0.5
"""Time past the deadline that a single call may take."""

P = ParamSpec("P")
R = TypeVar("R")

_postponed, _loaded, _always = threading.Event(), threading.Event(), threading.Event()

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def deadline(until: float) -> Iterator[None]:
    """Neither load nor compile anything that may take past a time of `time.monotonic`."""
    token = _deadline.set(until)
    try:
        yield
    finally:
        _deadline.reset(token)


def load() -> None:
    """Use compiled kernels from now on, however small the inputs are, if numba is available."""
    if is_available():
        importlib.import_module("numba")
        _always.set()


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
    return _is_installed()


@cache
def _is_installed() -> bool:
    # Cached: the look-up takes half a millisecond.
    return importlib.util.find_spec("numba") is not None


def int_zeros(count: int) -> NDArray[np.int64]:
    """Return a column of zeros: a list in plain Python, an array in compiled code."""
    return [0] * count  # type: ignore[return-value]


def float_zeros(count: int) -> NDArray[np.float64]:
    """Return a column of zeros: a list in plain Python, an array in compiled code."""
    return [0.0] * count  # type: ignore[return-value]


class Kernel(Generic[P, R]):
    """Decorator for a function to run as plain Python until compiling or loading it pays.

    The function may index its arguments (arrays and NamedTuples of arrays), compute, and call what
    numba supports and functions of its own package. It returns its results, or writes them into
    arguments that are one-dimensional arrays. ``fastmath`` is off, so arithmetic is not reordered,
    and compiled and plain results agree bit for bit.
    """

    all_spent_s: ClassVar[float] = 0.0

    def __init__(self, function: Callable[P, R]) -> None:
        self.function, self.spent_s = function, 0.0

    def __call__(self, steps: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run compiled or plain, whichever is faster for this number of steps and those before."""
        if self.pays(steps / STEPS_PER_S):
            _loaded.set()
            return self.compiled(*args, **kwargs)
        began_s = time.thread_time()
        try:
            return self.plain(*args, **kwargs)
        finally:
            spent_s = time.thread_time() - began_s
            self.spent_s += spent_s
            Kernel.all_spent_s += spent_s

    def pays(self, expected_s: float) -> bool:
        """Return True if running compiled pays for a call expected to take so long in Python."""
        if not is_available():
            return False
        is_asked = _always.is_set() or os.environ.get("STAGEWRIGHT_NUMBA") == "1"
        if is_asked or "compiled" in self.__dict__:
            return True
        spent_s, price_s = self.all_spent_s, 0.0 if _loaded.is_set() else LOAD_S
        if spent_s + expected_s >= price_s and not self.is_cached:
            spent_s, price_s = self.spent_s, COMPILE_S
        is_late = time.monotonic() + 4 * price_s > _deadline.get()
        return spent_s + expected_s >= price_s and not is_late

    def check_time(self, steps: int) -> None:
        """Raise `DeadlineExceeded` if a call of so many steps would end long after the deadline."""
        expected_s = steps / STEPS_PER_S
        if self.pays(expected_s):
            expected_s /= COMPILED_SPEED
        if time.monotonic() + expected_s > max(_deadline.get(), time.monotonic()) + LATE_S:
            raise DeadlineExceeded("the deadline is too near for a search among so many stages")

    @cached_property
    def is_cached(self) -> bool:
        """Return True if numba's cache has this kernel, as far as its files' names tell."""
        source = Path(self.function.__code__.co_filename)
        folder = os.environ.get("NUMBA_CACHE_DIR")
        found = Path(folder).rglob if folder else (source.parent / "__pycache__").glob
        return any(found(f"{source.stem}.{self._name}-*.nbi"))

    @cached_property
    def _callees(self) -> set[FunctionType]:
        return _find_callees(cast("FunctionType", self.function))

    @cached_property
    def _name(self) -> str:
        """Return the name in numba's cache, which changes with any file that it is made of.

        numba renews what it has cached for a function when that function's file changes. Index
        files of the names before stay in `__pycache__`: numba deletes none, and they do no harm.
        """
        files = sorted({each.__code__.co_filename for each in self._callees})
        sources = b"".join(Path(file).read_bytes() for file in files)
        return f"{cast('FunctionType', self.function).__name__}_{crc32(sources):08x}"

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """Return the compiled function; the first call compiles it or reads numba's cache."""
        import numba

        function: Any = self.function
        for callee in self._callees:
            _register(callee)
        try:
            function.__qualname__ = self._name
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
