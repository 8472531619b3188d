"""Results of a step on the master, when a stage cannot lend its weights."""

import pytest
from torch.futures import Future

from stagewright.runtime.rpc.calls import StageError
from stagewright.runtime.rpc.results import OutputCollector

FAILURE = StageError("on worker1: MemoryError: no room for the weight")


def test_a_failed_loan_ends_the_step_with_its_cause():
    """It used to show as a timeout of the micro-batches that waited for the weight."""
    collector, future = OutputCollector(), Future()
    step = collector.begin()
    future.add_done_callback(lambda done: collector.fail_if_loan_failed(step, done))
    assert not collector.has(1, 0)
    future.set_result(FAILURE)
    with pytest.raises(StageError, match="worker1: MemoryError: no room for the weight"):
        collector.has(1, 0)


def test_a_loan_of_an_earlier_step_or_of_a_lost_worker_is_not_this_steps_failure():
    collector, late, lost = OutputCollector(), Future(), Future()
    late.set_result(FAILURE)
    collector.begin()
    collector.fail_if_loan_failed(collector.begin() - 1, late)
    lost.set_exception(RuntimeError("RPCErr: the worker is gone"))
    collector.fail_if_loan_failed(1, lost)
    assert not collector.has(1, 0)
