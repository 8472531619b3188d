"""Micro-batches of a stage in order, whatever order their threads are in."""

import threading

import pytest

from stagewright.runtime.rpc.stage import StageSequencer, StepAbandoned

WAIT_S = 20


def start(turns, step, microbatch, log):
    def work():
        try:
            with turns.enter(step, microbatch):
                log.append((step, microbatch))
        except StepAbandoned:
            log.append("abandoned")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def finish(*threads):
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_turns_come_in_order_though_the_threads_do_not():
    turns, log = StageSequencer(), []
    finish(*[start(turns, 0, microbatch, log) for microbatch in (3, 1, 2, 0)])
    assert log == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_later_step_ends_the_waiting_for_an_earlier_one():
    turns, log = StageSequencer(), []
    old = start(turns, 0, 5, log)
    with turns.enter(1, 0):
        finish(old)
    assert log == ["abandoned"]
    with pytest.raises(StepAbandoned), turns.enter(0, 5):
        pass


def test_an_error_ends_its_step_and_no_other():
    turns, log = StageSequencer(), []
    waiting = start(turns, 0, 1, log)
    with pytest.raises(ArithmeticError), turns.enter(0, 0):
        raise ArithmeticError
    finish(waiting)
    finish(start(turns, 1, 0, log))
    assert log == ["abandoned", (1, 0)]


def test_no_turn_comes_between():
    turns, log = StageSequencer(), []
    with turns.exclusive:
        waiting = start(turns, 0, 0, log)
        assert not log
    finish(waiting)
    assert log == [(0, 0)]


def test_the_end_lets_everybody_go():
    turns, log = StageSequencer(), []
    waiting = start(turns, 0, 1, log)
    while turns._step != 0:
        pass
    turns.end()
    finish(waiting)
    assert log == ["abandoned"]
