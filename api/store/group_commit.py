"""Group commit: transactions of several threads become durable with one wait for the disk.

``docs/evidence/load.md`` measures the service with it, on SQLite under 200 clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Event

from sqlalchemy import Connection

MAX_WRITES_PER_COMMIT = 32
"""The first write in a group waits for the last."""


class NotCommitted(Exception):
    """A write waited for others in vain; nothing was written."""


class GroupCommit:
    """A queue of writers to SQLite, where one connection at a time may write.

    A commit waits for the disk for milliseconds, far longer than the writing takes. A thread that
    has written while others wait hands its open transaction to the next one, and the last of the
    group commits for all; each thread returns once that has happened, or raises why it has not. A
    write sees the earlier writes of its group; readers see them after the commit.

    ``begin`` opens a connection with a transaction that may write; a thread waits ``patience_s``
    for its turn.
    """

    def __init__(self, begin: Callable[[], Connection], patience_s: float) -> None:
        self._begin = begin
        self._patience_s = patience_s
        self._changed = Condition()  # guards the three fields below
        self._num_waiting = 0
        self._is_taken = False
        self._open_group: _Group | None = None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Wait for the turn and yield a connection; return once the write is on disk.

        Raises: NotCommitted.
        """
        self._take_turn()
        try:
            group = self._open_group or _Group(self._begin())
        except BaseException:
            self._end_turn(None)
            raise
        try:
            with group.write() as connection:
                yield connection
        finally:
            self._end_turn(group)
        # Outside the turn: the next thread writes while this one waits for the commit.
        group.wait()

    def _take_turn(self) -> None:
        with self._changed:
            self._num_waiting += 1
            is_mine = self._changed.wait_for(lambda: not self._is_taken, self._patience_s)
            self._num_waiting -= 1
            if not is_mine:
                raise NotCommitted("other writes take too long")
            self._is_taken = True

    def _end_turn(self, group: _Group | None) -> None:
        """Hand an open transaction to a waiting thread; without one, commit it."""
        with self._changed:
            # A waiting thread cannot be lost here: it either gets the turn, and with it the duty
            # to commit, or it gives up under this lock and is no longer counted.
            if group is not None and group.takes_more and self._num_waiting:
                self._open_group = group
                self._pass_turn()
                return
            self._open_group = None
        try:
            # Still holding the turn, but not the lock: threads may queue up during the commit,
            # and they form the next group.
            if group is not None:
                group.commit()
        finally:
            with self._changed:
                self._pass_turn()

    def _pass_turn(self) -> None:
        self._is_taken = False
        self._changed.notify()


class _Group:
    """Writes of several threads in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_writes = 0
        self._is_lost = False
        self._ended = Event()
        # Kept if the committing thread is killed before it can say how it went.
        self._error: Exception | None = NotCommitted("the thread that committed was ended")

    @property
    def takes_more(self) -> bool:
        return not self._is_lost and self._num_writes < MAX_WRITES_PER_COMMIT

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield the connection for one write; if it raises, the earlier writes stay."""
        try:
            if self._num_writes == 0:
                yield self._connection
            else:  # a savepoint, so that only this write is undone
                with self._connection.begin_nested():
                    yield self._connection
        except BaseException:
            self._is_lost = self._num_writes == 0 or self._was_rolled_back()
            raise
        self._num_writes += 1

    def _was_rolled_back(self) -> bool:
        """Return True if SQLite undid the transaction by itself, e.g. because the disk is full."""
        driver = self._connection.connection.driver_connection
        return driver is None or not driver.in_transaction

    def commit(self) -> None:
        """Commit what was written and wake the threads that wait for it."""
        try:
            with self._connection:  # closing it rolls back what is not committed
                self._commit()
            self._error = None
        except Exception as error:  # noqa: BLE001 - raised by all waiting threads
            self._error = error
        finally:
            self._ended.set()

    def _commit(self) -> None:
        if self._num_writes == 0:
            return
        # A commit after such a rollback would succeed and have written nothing.
        if self._is_lost or self._was_rolled_back():
            raise NotCommitted("it was rolled back with another write that failed")
        try:
            self._connection.commit()
        except Exception:
            self._connection.connection.rollback()
            raise

    def wait(self) -> None:
        """Return once the group is committed, or raise the error that prevented it."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
