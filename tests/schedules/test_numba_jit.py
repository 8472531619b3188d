"""What compiled kernels may call."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from stagewright.planner.search.label_kernel import grow, search_labels
from stagewright.planner.search.relaxation_kernel import place, relax_arcs
from stagewright.schedules import numba_jit
from stagewright.schedules.numba_jit import Kernel, _find_callees, int_zeros


def double(count: int) -> int:
    return len(make_column(count)) * 2


def make_column(count: int) -> np.ndarray:
    return int_zeros(count)


def test_a_kernel_finds_what_it_calls_in_other_modules():
    assert {place, relax_arcs, grow, int_zeros} <= _find_callees(search_labels)


def test_a_function_of_numbers_may_not_call_one_that_returns_an_array():
    """Its compiled code counts no references, so the column would never be freed."""
    with pytest.raises(AssertionError, match="make_column"):
        _find_callees(double)


def test_a_change_of_a_called_file_renews_the_cached_kernel():
    pytest.importorskip("numba")
    name, _, digest = Kernel(search_labels).compiled.__qualname__.rpartition("_")
    assert (name, len(digest)) == ("search_labels", 8)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel of a process that has compiled and spent nothing yet; ten units take a second."""
    pytest.importorskip("numba")
    clock_s = itertools.count(step=0.1)
    monkeypatch.setattr(numba_jit.time, "thread_time", lambda: next(clock_s))
    monkeypatch.setattr(Kernel, "all_spent_s", 0.0)
    for name in ("_always", "_loaded"):
        monkeypatch.setattr(numba_jit, name, threading.Event())
    monkeypatch.delenv("STAGEWRIGHT_NUMBA", raising=False)
    return Kernel(half)


def half(number: int) -> int:
    return number // 2


def calls_until_it_pays(kernel: Kernel, most: int = 1_000) -> int:
    for number in range(most):
        if kernel.pays(0.0):
            return number
        kernel(1, 4)
    return most


def test_small_calls_that_together_take_long_load_a_cached_kernel(kernel):
    kernel.is_cached = True
    assert calls_until_it_pays(kernel) == pytest.approx(numba_jit.LOAD_S / 0.1, abs=1)


def test_a_kernel_that_is_not_cached_is_compiled_after_as_long_as_that_takes(kernel):
    kernel.is_cached = False
    assert calls_until_it_pays(kernel) == pytest.approx(numba_jit.COMPILE_S / 0.1, abs=2)


def test_nothing_is_loaded_that_may_take_past_a_deadline(kernel):
    kernel.is_cached = True
    with numba_jit.deadline(time.monotonic() + numba_jit.LOAD_S):
        assert calls_until_it_pays(kernel, 100) == 100
    assert kernel.pays(0.0)


def test_nor_is_a_small_problem_where_numba_is_there_already():
    """Cause: whoever had imported numba waited half a minute for a problem of four plans."""
    pytest.importorskip("numba")
    code = """
import numba
from stagewright import PlanOptions, plan
from stagewright.schedules.numba_jit import Kernel
from tests.builders import chain_profile
Kernel.compiled = property(lambda kernel: 1 / 0)
for schedule in ("1f1b", "zero_bubble", "zbv"):
    plan(chain_profile([1.0, 2.0, 3.0]), "2xcpu", PlanOptions(schedule=schedule))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
