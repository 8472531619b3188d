"""What every test of the planner may use."""

import pytest

from stagewright.schedules import numba_jit as jit


@pytest.fixture(autouse=True, scope="session")
def _compiled():
    """Machine code from the first plan on, where there is numba: thousands of plans are made.

    Small problems would not load it, and take ten times as long. That both ways give the same is
    what `test_label_setting`, `test_properties` and `test_simulate` are for.
    """
    jit.load()
