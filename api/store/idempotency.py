"""Answers already given: by idempotency key, and by what was asked.

See `contract.Idempotency` and `contract.Reuse`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from ...core.errors import InvalidInput
from .database import Database
from .errors import AnswerPending, KeyReused
from .records import Answer
from .tables import ANSWERS, PLANS, PROFILES, REUSE

ANSWERS_KEPT = timedelta(days=1)
MAX_KEY_CHARACTERS = 255


class SqlIdempotency:
    """`contract.Idempotency` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(
        self,
        project_id: str,
        key: str,
        request_digest: str,
        *,
        holder: str,
        lease_s: float = 60.0,
    ) -> Answer | None:
        if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
            raise InvalidInput(
                f"an Idempotency-Key has 1 to {MAX_KEY_CHARACTERS} characters, not {len(key)}"
            )
        now = self._database.now()
        claim = {
            "project_id": project_id,
            "key": key,
            "request_digest": request_digest,
            "holder": holder,
            "created_at": now,
            "leased_until": now + timedelta(seconds=lease_s),
            "expires_at": now + ANSWERS_KEPT,
        }
        with self._database.write() as connection:
            mine = _mine(project_id, key)
            connection.execute(delete(ANSWERS).where(mine, ANSWERS.c.expires_at <= now))
            insert = self._database.insert(ANSWERS).values(**claim).on_conflict_do_nothing()
            if connection.execute(insert.returning(ANSWERS.c.key)).first() is not None:
                return None
            row = connection.execute(select(ANSWERS).where(mine).with_for_update()).first()
            if row is None:
                raise AnswerPending(key)  # given up a moment ago
            if row.request_digest != request_digest:
                raise KeyReused(key)
            if row.answer is not None:
                return Answer.model_validate_json(row.answer)
            if row.leased_until > now:
                raise AnswerPending(key)
            taken = update(ANSWERS).where(mine)
            connection.execute(taken.values(holder=holder, leased_until=claim["leased_until"]))
            return None

    def renew(self, project_id: str, key: str, *, holder: str, lease_s: float) -> None:
        until = self._database.now() + timedelta(seconds=lease_s)
        with self._database.write() as connection:
            held = update(ANSWERS).where(_held(project_id, key, holder))
            connection.execute(held.values(leased_until=until))

    def complete(self, project_id: str, key: str, answer: Answer, *, holder: str) -> Answer:
        mine = _mine(project_id, key)
        held = update(ANSWERS).where(_held(project_id, key, holder))
        with self._database.write() as connection:
            connection.execute(held.values(answer=answer.model_dump_json()))
            row = connection.execute(select(ANSWERS.c.answer).where(mine)).first()
        if row is None:  # taken over and given up since, or a day has passed
            return answer
        if row.answer is None:
            raise AnswerPending(key)
        return Answer.model_validate_json(row.answer)

    def release(self, project_id: str, key: str, *, holder: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(ANSWERS).where(_held(project_id, key, holder)))


class SqlReuse:
    """`contract.Reuse` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def remember(self, project_id: str, kind: str, request_digest: str, result_id: str) -> None:
        with self._database.write() as connection:
            remember(connection, self._database, project_id, kind, request_digest, result_id)

    def recall(self, project_id: str, kind: str, request_digest: str) -> str | None:
        noted = select(REUSE.c.result_id).where(
            REUSE.c.project_id == project_id,
            REUSE.c.kind == kind,
            REUSE.c.request_digest == request_digest,
        )
        with self._database.read() as connection:
            row = connection.execute(noted).first()
            if row is None or not _is_stored(connection, project_id, row):
                return None
        return str(row.result_id)


def remember(
    connection: Connection,
    database: Database,
    project_id: str,
    kind: str,
    request_digest: str,
    result_id: str,
) -> None:
    """As `SqlReuse.remember`, in a transaction of the caller's."""
    found = {"result_id": result_id, "created_at": database.now()}
    key = {"project_id": project_id, "kind": kind, "request_digest": request_digest}
    insert = database.insert(REUSE).values(**key, **found)
    connection.execute(insert.on_conflict_do_update(index_elements=list(key), set_=found))


def _mine(project_id: str, key: str) -> Any:
    return (ANSWERS.c.project_id == project_id) & (ANSWERS.c.key == key)


def _held(project_id: str, key: str, holder: str) -> Any:
    """A claim that is still this holder's, and not answered."""
    unanswered = ANSWERS.c.answer.is_(None)
    return _mine(project_id, key) & (ANSWERS.c.holder == holder) & unanswered


def _is_stored(connection: Connection, project_id: str, row: Row[Any]) -> bool:
    """Whether retention has left the document."""
    return any(
        connection.execute(
            select(table.c.id).where(table.c.project_id == project_id, table.c.id == row.result_id)
        ).first()
        for table in (PLANS, PROFILES)
    )
