"""What makes a rank abort its communicators, and what must not."""

import contextlib
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from stagewright.core.errors import NonFinite, RankFailed
from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.ranks import communicator_watcher, failure_detection
from stagewright.runtime.ranks.communicator_watcher import CommunicatorWatcher
from stagewright.runtime.ranks.failure_detection import FailureDetector

pytestmark = pytest.mark.timeout(60)
LONG_S = 300.0
ENOUGH_S = 20.0
"""Longer than any of this takes on a busy machine."""


class Rank:
    """One of two ranks in this process, whose process never ends by itself."""

    def __init__(self, store, rank, timeout_s=LONG_S):
        self.aborted = threading.Event()
        self.detector = FailureDetector(store, rank, 2)
        self.watcher = CommunicatorWatcher(self.detector, timeout_s, self.aborted.set)

    def end_process(self):
        """Stop the heartbeat and close the connection, as the system does for a dead process."""
        self.detector.close()
        self.watcher._listener.close()

    def close(self):
        self.watcher.close()
        self.detector.close()


@pytest.fixture
def start(monkeypatch):
    """Start a pair of ranks; both are closed at the end."""
    host, port, waits = "127.0.0.1", free_port(), timedelta(seconds=30)
    monkeypatch.setattr(failure_detection, "group_timeout", lambda _: waits)
    hosted = dist.TCPStore(host, port, is_master=True, timeout=waits, wait_for_workers=False)
    stores = hosted, dist.TCPStore(host, port, is_master=False, timeout=waits)
    with contextlib.ExitStack() as stack:

        def start_pair(**options):
            ranks = [Rank(store, rank, **options) for rank, store in enumerate(stores)]
            for rank in ranks:
                stack.callback(rank.close)
            return ranks

        yield start_pair


def wait_until_connected(rank):
    """Wait until the rank before this one has connected to it."""
    rank.watcher._listener.settimeout(ENOUGH_S)
    connection, _ = rank.watcher._listener.accept()
    return connection


def use(rank, communicate):
    """The error in which a use of other ranks ends."""
    with pytest.raises(RankFailed) as raised, rank.detector.explain_errors():
        communicate()
    return raised.value


def test_the_end_of_a_process_is_noticed_without_any_communication(start):
    ours, theirs = start()
    connection = wait_until_connected(theirs)
    theirs.end_process()
    connection.close()
    assert ours.aborted.wait(ENOUGH_S)
    error = use(ours, lambda: None)
    assert error.ranks == (1,)
    assert re.match(r"rank 1 \(.*\) stopped answering", str(error))


def test_what_garbage_raises_is_not_blamed_on_the_model(start):
    ours, theirs = start()

    def read_garbage():
        wait_until_connected(theirs).close()
        theirs.end_process()
        assert ours.aborted.wait(ENOUGH_S)
        raise NonFinite("the loss is NaN")

    assert "stopped answering" in str(use(ours, read_garbage))


def test_a_process_that_no_abort_frees_is_ended_with_the_reason(start, monkeypatch, capfd):
    """NCCL may block where aborting its communicators does not help."""
    ended = threading.Event()
    monkeypatch.setattr(communicator_watcher, "end_process", lambda code: ended.set())
    monkeypatch.setattr(communicator_watcher, "STUCK_S", 1.0)
    ours, theirs = start()

    def stay_blocked():
        wait_until_connected(theirs).close()
        theirs.end_process()
        assert ended.wait(2 * ENOUGH_S)

    use(ours, stay_blocked)
    assert re.search(r"^RankFailed: rank 1 \(.*\) stopped answering", capfd.readouterr().err)


def test_a_rank_at_its_own_work_is_not_ended(start, monkeypatch):
    codes = []
    monkeypatch.setattr(communicator_watcher, "end_process", codes.append)
    monkeypatch.setattr(communicator_watcher, "STUCK_S", 0.0)
    ours, theirs = start()
    wait_until_connected(theirs).close()
    theirs.end_process()
    assert ours.aborted.wait(ENOUGH_S)
    use(ours, lambda: None)
    assert codes == []


def test_a_rank_that_says_farewell_is_not_missed(start):
    ours, theirs = start()
    connection = wait_until_connected(theirs)
    connection.sendall(communicator_watcher.FAREWELL)
    connection.close()
    theirs.end_process()
    assert not ours.aborted.wait(2 * communicator_watcher.SILENCE_S)


def test_a_broken_connection_to_a_rank_that_lives_is_no_failure(start):
    """A firewall may allow none at all."""
    ours, theirs = start()
    wait_until_connected(theirs).close()
    assert not ours.aborted.wait(2 * communicator_watcher.SILENCE_S)
    assert not ours.detector.has_verdict


def test_an_address_that_cannot_be_reached_is_no_failure(start, monkeypatch):
    def refuse(*_, **__):
        raise TimeoutError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    ours, _ = start()
    assert not ours.aborted.wait(2 * communicator_watcher.SILENCE_S)


def test_a_rank_that_waits_for_too_long_says_what_the_others_are_at(start):
    ours, theirs = start(timeout_s=1.0)
    theirs.detector.set_activity("the forward of micro-batch 0 on stage 1")
    ours.detector.set_activity("the wait for rank 1")
    error = use(ours, lambda: ours.aborted.wait(ENOUGH_S))
    assert "rank 1 was at the forward of micro-batch 0" in str(error)


@pytest.mark.parametrize("master", ["127.0.0.1", "::1", "localhost", "no such host"])
def test_its_address_is_of_the_kind_that_ranks_meet_at(monkeypatch, master):
    monkeypatch.setenv("MASTER_ADDR", master)
    usual = {
        "127.0.0.1": {"127.0.0.1"},
        "::1": {"::1", socket.gethostname()},
        "localhost": {"127.0.0.1", "::1"},
    }
    assert communicator_watcher._own_address() in usual.get(master, {socket.gethostname()})


def test_time_spent_outside_of_communication_does_not_count(start):
    ours, _ = start(timeout_s=0.5)
    with ours.detector.explain_errors():
        pass
    time.sleep(1)
    assert not ours.aborted.is_set()


def test_activities_that_take_long_are_given_more_time(start):
    """Ranks that all write a checkpoint for minutes wait for nobody."""
    ours, _ = start(timeout_s=0.5)
    ours.detector.patience = 1000.0
    with ours.detector.explain_errors():
        ours.detector.set_activity("the wait for rank 1")
        time.sleep(1.5)
    assert not ours.aborted.is_set()


def test_the_loss_of_the_store_is_that_of_its_host(start):
    """A rank whose next one lives would hear of it no other way."""
    ours, _ = start()
    ours.detector._beats.has_lost_store = True
    assert ours.aborted.wait(ENOUGH_S)


def test_an_error_of_another_rank_ends_this_one_s_wait(start):
    ours, theirs = start()
    theirs.detector.announce_end(ValueError("of its own"))
    assert ours.aborted.wait(ENOUGH_S)
