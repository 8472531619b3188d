"""A fault of each kind in a pipeline of four ranks: all ranks left name rank and cause, in time.

The whole run of a hundred is ``python benchmarks/faults.py``; its table is in
``docs/evidence/faults.md``.
"""

import pytest

from benchmarks.faults import FAULTS
from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


@pytest.mark.parametrize("manners", [(), ("--as-on-nccl",)], ids=["gloo", "as on NCCL"])
def test_one_fault_of_each_kind(forking_executable, manners):
    output = run_worker(
        forking_executable, "benchmarks.faults", "--times", str(len(FAULTS)), "--seed", "2",
        "--timeout", "12", *manners, timeout_s=240,
    )  # fmt: skip
    for kind in FAULTS:
        assert f"| {kind} | 1 | 1 |" in output
