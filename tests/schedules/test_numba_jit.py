"""What compiled kernels may call."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.planner.search.label_kernel import grow, search_labels
from stagewright.planner.search.relaxation_kernel import place, relax_arcs
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
