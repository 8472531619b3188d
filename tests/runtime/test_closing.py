"""A closed pipeline leaves nothing behind; replicas agree on what they evaluate, or refuse."""

import json

import pytest

from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def told(forking_executable):
    output = run_worker(forking_executable, "tests.runtime.closing_worker", timeout_s=170)
    return [json.loads(line) for line in output.splitlines()]


def test_outputs_with_gaps_are_evaluated_alike_by_replicas(told):
    """They were broadcast as they lay in memory, into tensors that lay otherwise."""
    found = [line["evaluated"] for line in told if "evaluated" in line]
    assert len(found) == 4
    assert max(found) < 1e-12


def test_closed_pipelines_leave_no_files_threads_or_groups(told):
    """Each left ten open files, six threads and two groups: a process ended at its limit."""
    for line in told:
        if "used" in line:
            first, *_, last = line["used"]
            assert last[2] == first[2] == 1
            assert last[0] <= first[0] + 1
            assert last[1] <= first[1] + 1


def test_replicas_refuse_what_each_would_move_its_own_way(told):
    """A moving average was each replica's own: gradients were off by a seventh, without a word."""
    found = [line["refused"] for line in told if "refused" in line]
    assert len(found) == 2
    for step, evaluation in found:
        assert "changes the buffer 'seen'" in step
        assert "plan without replicas of that stage (max_replicas=1)" in step
        assert "'norm' is in training mode" in evaluation
