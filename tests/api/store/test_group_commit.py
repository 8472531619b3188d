"""Writes of several threads to SQLite are committed together, each told what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import Connection, event, text

from stagewright.api.store.database import Database
from stagewright.api.store.errors import StoreUnavailable
from stagewright.api.store.group_commit import MAX_WRITES_PER_COMMIT, NotCommitted, _Group

PATIENCE_S = 20

Part = Callable[[Connection], None]


class Board:
    """A table of numbers that threads write to.

    Attributes:
        num_commits: How often the disk was waited for.
    """

    def __init__(self, path: Path) -> None:
        self.database = Database(str(path), now=lambda: datetime.now(UTC))
        self.num_commits = 0
        with self.database.write() as connection:
            connection.execute(text("CREATE TABLE numbers (number INTEGER)"))
        event.listen(self.database.engine, "commit", self._committed)

    def _committed(self, _: Connection) -> None:
        self.num_commits += 1

    def numbers(self) -> list[int]:
        """What readers see."""
        with self.database.read() as connection:
            rows = connection.execute(text("SELECT number FROM numbers ORDER BY number"))
            return [row.number for row in rows]

    def written(self, parts: list[Part]) -> list[Exception | None]:
        """What each of several writes raised, all waiting for a first one, in this order."""
        with ThreadPoolExecutor(len(parts) + 1) as threads:
            going, may_end = Event(), Event()

            def first(connection: Connection) -> None:
                going.set()
                assert may_end.wait(PATIENCE_S)
                insert(0)(connection)

            futures = [threads.submit(self._write, first)]
            assert going.wait(PATIENCE_S)
            for number, part in enumerate(parts, 1):
                futures.append(threads.submit(self._write, part))
                self._wait_for(number)
            may_end.set()
            return [self._error(future) for future in futures]

    def _write(self, part: Part) -> None:
        with self.database.write() as connection:
            part(connection)

    def _wait_for(self, number: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while self.database.group_commit._num_waiting < number:
            assert time.monotonic() < end_s, "a thread does not wait for its turn"
            time.sleep(0.001)

    def _error(self, future: Future[None]) -> Exception | None:
        error = future.exception(PATIENCE_S)
        assert error is None or isinstance(error, Exception)
        return error


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    made = Board(tmp_path / "numbers.db")
    yield made
    made.database.close()


def insert(number: int) -> Part:
    """A write of one number."""

    def part(connection: Connection) -> None:
        connection.execute(text("INSERT INTO numbers VALUES (:number)"), {"number": number})

    return part


def failing(connection: Connection) -> None:
    insert(99)(connection)
    raise ZeroDivisionError


def test_who_waits_is_committed_together(board: Board) -> None:
    assert board.written([insert(number) for number in range(1, 6)]) == [None] * 6
    assert board.numbers() == [0, 1, 2, 3, 4, 5]
    assert board.num_commits == 1


def test_not_too_many_are_committed_together(board: Board) -> None:
    parts = [insert(number) for number in range(1, MAX_WRITES_PER_COMMIT + 3)]
    assert board.written(parts) == [None] * (MAX_WRITES_PER_COMMIT + 3)
    assert len(board.numbers()) == MAX_WRITES_PER_COMMIT + 3
    assert board.num_commits == 2


def test_one_that_fails_leaves_the_others(board: Board) -> None:
    errors = board.written([insert(1), failing, insert(2)])
    assert [type(error) for error in errors if error] == [ZeroDivisionError]
    assert isinstance(errors[2], ZeroDivisionError)
    assert board.numbers() == [0, 1, 2]


def test_a_first_one_that_fails_leaves_the_next(board: Board) -> None:
    with pytest.raises(ZeroDivisionError), board.database.write() as connection:
        failing(connection)
    assert board.written([insert(1)]) == [None, None]
    assert board.numbers() == [0, 1]


def test_what_others_wrote_is_seen_as_after_a_commit(board: Board) -> None:
    seen = []

    def look(connection: Connection) -> None:
        seen.append(connection.execute(text("SELECT count(*) FROM numbers")).scalar_one())

    assert board.written([insert(1), look]) == [None] * 3
    assert seen == [2]


def test_if_the_commit_fails_all_are_told_and_nothing_is_written(board: Board) -> None:
    with board.database.write() as connection:
        connection.execute(text("CREATE TABLE whole (id INTEGER PRIMARY KEY)"))
        connection.execute(
            text("CREATE TABLE parts (id REFERENCES whole(id) DEFERRABLE INITIALLY DEFERRED)")
        )

    def dangling(connection: Connection) -> None:
        connection.execute(text("INSERT INTO parts VALUES (7)"))

    errors = board.written([insert(1), dangling, insert(2)])
    assert all("FOREIGN KEY" in str(error) for error in errors)
    assert board.numbers() == []
    assert board.written([insert(3)]) == [None, None]


def test_what_sqlite_takes_back_by_itself_is_told_to_all(board: Board) -> None:
    """As it does when the disk is full: without a transaction a commit would do nothing."""

    def taken_back(connection: Connection) -> None:
        connection.exec_driver_sql("ROLLBACK")
        raise ZeroDivisionError

    errors = board.written([insert(1), taken_back, insert(2)])
    assert isinstance(errors[0], StoreUnavailable)
    assert isinstance(errors[1], StoreUnavailable)
    assert "rolled back" in str(errors[1])
    assert errors[2] is not None
    assert errors[3] is None, "the one behind has a transaction of its own"
    assert board.numbers() == [2]
    assert board.written([insert(3)]) == [None, None]


def test_who_waits_is_told_where_the_committing_thread_is_ended() -> None:
    class Ended(Connection):
        def __init__(self) -> None:
            pass

        def __enter__(self) -> Ended:
            raise SystemExit

        def __exit__(self, *_: object) -> None:
            pass

    group = _Group(Ended())
    with pytest.raises(SystemExit):
        group.commit()
    assert group._ended.is_set()
    with pytest.raises(NotCommitted):
        group.wait()
