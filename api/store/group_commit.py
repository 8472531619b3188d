"""Transactions of several threads that wait for the disk together, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Event

from sqlalchemy import Connection

MOST_TOGETHER = 32
"""Transactions in one; the first of them waits for the last."""


class Waited(Exception):
    """For others, in vain; nothing was written."""


class WritesTogether:
    """Lets one thread write at a time, and commits what others are waiting behind with theirs.

    Making a commit last takes the disk milliseconds, far longer than the writing. A thread that
    has written while others wait for their turn hands the transaction on to them, and the last of
    them commits for all; each returns when that has been done, or raises why it was not. What one
    writes the next sees, as it would after a commit; readers see it when it is committed.

    Args:
        begin: Opens a connection, in a transaction that may write.
        patience_s: Longest one waits for its turn.
    """

    def __init__(self, begin: Callable[[], Connection], patience_s: float) -> None:
        self._begin = begin
        self._patience_s = patience_s
        self._changed = Condition()
        self._num_waiting = 0
        self._is_taken = False
        self._batch: _Batch | None = None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A turn; on leaving, what was written is committed, or rolled back if it raises.

        Raises:
            Waited: Others take too long, or took this one back with theirs.
            Exception: What beginning or committing raises.
        """
        self._take()
        try:
            batch = self._batch or _Batch(self._begin())
        except BaseException:
            self._leave(None)
            raise
        try:
            with batch.part() as connection:
                yield connection
        finally:
            self._leave(batch)
        batch.wait()

    def _take(self) -> None:
        with self._changed:
            self._num_waiting += 1
            is_mine = self._changed.wait_for(lambda: not self._is_taken, self._patience_s)
            self._num_waiting -= 1
            if not is_mine:
                raise Waited("other writes take too long")
            self._is_taken = True

    def _leave(self, batch: _Batch | None) -> None:
        """Hand an open transaction on if somebody waits for it; commit it if not."""
        with self._changed:
            if batch is not None and batch.takes_more and self._num_waiting:
                self._batch = batch
                self._free()
                return
            self._batch = None
        try:
            if batch is not None:
                batch.end()
        finally:
            with self._changed:
                self._free()

    def _free(self) -> None:
        self._is_taken = False
        self._changed.notify()


class _Batch:
    """One transaction for several."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_parts = 0
        self._is_lost = False
        self._ended = Event()
        self._error: Exception | None = Waited("the thread that committed was ended")

    @property
    def takes_more(self) -> bool:
        return not self._is_lost and self._num_parts < MOST_TOGETHER

    @contextmanager
    def part(self) -> Iterator[Connection]:
        """One of them; if it raises, the ones before stay."""
        try:
            if self._num_parts == 0:
                yield self._connection
            else:
                with self._connection.begin_nested():
                    yield self._connection
        except BaseException:
            self._is_lost = self._num_parts == 0 or self._was_taken_back()
            raise
        self._num_parts += 1

    def _was_taken_back(self) -> bool:
        """Whether SQLite rolled all back by itself, as it does where the disk is full."""
        driver = self._connection.connection.driver_connection
        return driver is None or not driver.in_transaction

    def end(self) -> None:
        """Commit what there is; whoever waits is told."""
        try:
            with self._connection:  # closing it rolls back what is not committed
                self._commit()
            self._error = None
        except Exception as error:  # noqa: BLE001 - raised by all who wait
            self._error = error
        finally:
            self._ended.set()

    def _commit(self) -> None:
        if self._num_parts == 0:
            return
        if self._is_lost or self._was_taken_back():  # a commit would do nothing, and not say so
            raise Waited("it was rolled back with another write that failed")
        try:
            self._connection.commit()
        except Exception:
            self._connection.connection.rollback()
            raise

    def wait(self) -> None:
        """Return when it is committed.

        Raises:
            Exception: Why it could not be.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
