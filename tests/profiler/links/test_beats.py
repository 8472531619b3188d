"""Which rank stopped first, told to all before the store they meet at leaves."""

import threading
import time

from stagewright.profiler.links.beats import Beats


class MetStore:
    """The part of a store that heartbeats use; its host may leave."""

    def __init__(self):
        self._words, self._lock, self.is_gone = {}, threading.Lock(), False

    def _open(self):
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return self._words

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
    ranks = [Beats(store, rank, 3) for rank in range(3)]
    ranks[2].close()  # it dies
    assert ranks[0].lost() == (2,)  # the store's host fails first, and leaves when all have heard
    store.is_gone = True
    assert ranks[1].lost() == (2,)
    for rank in ranks:
        rank.close()


def test_a_store_that_leaves_without_a_word_is_its_hosts_doing():
    store = MetStore()
    ranks = [Beats(store, rank, 2) for rank in range(2)]
    store.is_gone = True
    assert ranks[1].lost() == (0,)
    assert ranks[0].lost() == ()
    for rank in ranks:
        rank.close()


def test_the_first_to_fail_leaves_as_soon_as_all_have_heard(monkeypatch):
    monkeypatch.setattr("stagewright.profiler.links.beats.HEARING_S", 1e6)
    store = MetStore()
    ranks = [Beats(store, rank, 4) for rank in range(4)]
    ranks[3].close()
    started = time.monotonic()
    assert ranks[1].lost() == (3,)
    assert time.monotonic() - started < 60
    for rank in ranks:
        rank.close()
