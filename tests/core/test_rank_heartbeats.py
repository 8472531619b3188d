"""Which rank stopped first, told to all before the store they meet at leaves."""

import threading
import time

import pytest

from stagewright.core.rank_heartbeats import Heartbeats, StoreSilent


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("stagewright.core.rank_heartbeats.INTERVAL_S", 0.05)
    monkeypatch.setattr("stagewright.core.rank_heartbeats.SILENCE_S", 1.0)


class MetStore:
    """The part of a store that heartbeats use; its host may leave."""

    def __init__(self):
        self._words, self._lock, self.is_gone = {}, threading.Lock(), False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _open(self):
        self.goes_on.wait()
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return self._words

    def has_extended_api(self):
        return False

    def set(self, key, value):
        with self._lock:
            self._open()[key] = value.encode()

    def get(self, key):
        with self._lock:
            return self._open()[key]

    def check(self, keys):
        with self._lock:
            return all(key in self._open() for key in keys)

    def compare_set(self, key, expected, wanted):
        with self._lock:
            words = self._open()
            if words.get(key, b"").decode() == expected:
                words[key] = wanted.encode()
            return words[key]

    def add(self, key, amount):
        with self._lock:
            words = self._open()
            words[key] = str(int(words.get(key, b"0")) + amount).encode()
            return int(words[key])


def test_ranks_that_fail_after_the_store_left_still_name_the_first_to_stop():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 3) for rank in range(3)]
    ranks[2].close()  # it dies
    assert ranks[0].find_out().ranks == (
        2,
    )  # the store's host fails first, and leaves when all have heard
    store.is_gone = True
    assert ranks[1].find_out().ranks == (2,)
    for rank in ranks:
        rank.close()


def test_a_store_that_leaves_without_a_word_is_its_hosts_doing():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    store.is_gone = True
    assert ranks[1].find_out().ranks == (0,)
    assert ranks[0].find_out().ranks == ()
    for rank in ranks:
        rank.close()


def test_the_first_to_fail_leaves_as_soon_as_all_have_heard(monkeypatch):
    monkeypatch.setattr("stagewright.core.rank_heartbeats.HEARING_S", 1e6)
    store = MetStore()
    ranks = [Heartbeats(store, rank, 4) for rank in range(4)]
    ranks[3].close()
    started = time.monotonic()
    assert ranks[1].find_out().ranks == (3,)
    assert time.monotonic() - started < 60
    for rank in ranks:
        rank.close()


def test_a_rank_that_never_came_is_named_and_nobody_waits_for_its_key():
    """A store waits, for its whole timeout, when asked for a key that was never set."""
    store = MetStore()
    here = [Heartbeats(store, rank, 3) for rank in range(2)]
    verdict = here[0].find_out()
    assert verdict.ranks == (2,)
    assert verdict.what.startswith("rank 2 never joined")
    assert here[1].find_out() == verdict
    for rank in here:
        rank.close()


def test_the_words_of_a_rank_that_ends_by_its_own_error_are_heard_by_all():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2, where=f"host {rank}") for rank in range(2)]
    ranks[1].leave_word("raised ValueError: no such label")
    verdict = ranks[0].find_out()
    assert verdict.ranks == (1,)
    assert verdict.what == "rank 1 (host 1) raised ValueError: no such label"
    for rank in ranks:
        rank.close()


def test_what_a_rank_showed_before_it_died_is_told():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2, where=f"host {rank}") for rank in range(2)]
    ranks[1].close()
    ranks[1].activity = "its own error, InvalidInput: no target"
    ranks[1].show()
    verdict = ranks[0].find_out()
    assert verdict.what == (
        "rank 1 (host 1) stopped answering (last seen at its own error, InvalidInput: no target)"
    )
    ranks[0].close()


def test_where_all_answer_the_one_that_does_not_wait_is_named():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 3) for rank in range(3)]
    ranks[1].activity, ranks[2].activity = "its own work after step 3", "the wait for rank 1"
    while b"rank 1" not in store.get("beat/2"):
        time.sleep(0.01)
    verdict = ranks[0].find_out()
    assert verdict.ranks == ()
    assert verdict.what.endswith("still alive: rank 1 was at its own work after step 3")
    for rank in ranks:
        rank.close()


def test_a_store_whose_host_is_stopped_keeps_nobody_waiting():
    """A rank stopped, not killed, leaves connections open and answers nothing: all others hung."""
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    store.goes_on.clear()
    begin = time.monotonic()
    assert ranks[1].find_out().ranks == (0,)
    ranks[1].show()
    ranks[1].leave_word("raised an error")
    with pytest.raises(StoreSilent, match="the store has not answered for"):
        ranks[1].publish("key", "value")
    ranks[1].close()
    assert time.monotonic() - begin < 20
    store.goes_on.set()
    ranks[0].close()


def test_a_rank_that_dies_before_it_publishes_is_not_waited_for(monkeypatch):
    """It was noticed only after the group's timeout: nothing else fails while others wait."""
    monkeypatch.setattr("stagewright.core.rank_heartbeats.DEAD_S", 1.0)
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    ranks[0].close()
    begin = time.monotonic()
    assert ranks[1].wait_for("plan of 0", 600, 0) is None
    assert time.monotonic() - begin < 60
    assert ranks[1].find_out().ranks == (0,)
    ranks[1].close()


def test_what_ranks_publish_is_read_by_others_or_given_up_once_one_has_failed():
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    ranks[0].publish("plan of 0", "p1")
    assert ranks[1].read(["plan of 0", "plan of 1"]) == ["p1", None]
    assert ranks[1].wait_for("plan of 0", 10, 0) == "p1"
    assert ranks[1].wait_for("plan of 1", 0.1, 1) is None
    assert ranks[1].await_verdict(0.1) is None
    ranks[0].leave_word("raised an error")
    assert ranks[1].wait_for("plan of 1", 100, 1) is None
    assert "raised an error" in ranks[1].await_verdict(10).what
    for rank in ranks:
        rank.close()


def test_the_host_of_the_store_stays_until_all_have_finished():
    """Rank 1 was told that rank 0 had failed, at the end of a run in which nothing had."""
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    host = threading.Thread(target=ranks[0].say_farewell)
    host.start()
    time.sleep(0.3)
    assert host.is_alive(), "rank 1 still reads what the store holds"
    started = time.monotonic()
    ranks[1].say_farewell()
    host.join(20)
    assert not host.is_alive()
    assert time.monotonic() - started < 3.0
    for rank in ranks:
        rank.close()


def test_the_host_does_not_stay_for_ever_nor_for_a_failure(monkeypatch):
    monkeypatch.setattr("stagewright.core.rank_heartbeats.FAREWELL_S", 0.2)
    store = MetStore()
    ranks = [Heartbeats(store, rank, 2) for rank in range(2)]
    ranks[0].say_farewell()  # rank 1 goes on with work of its own
    store.is_gone = True
    ranks[1].say_farewell()
    for rank in ranks:
        rank.close()
