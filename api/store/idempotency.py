"""Stored answers: by idempotency key, and by digest of the request."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, or_, select, update

from ...core.errors import InvalidInput
from .database import Database
from .errors import AnswerPending, KeyReused
from .projects import charge, delete_rows, lock_projects
from .records import Answer
from .tables import ANSWERS, PLANS, PROFILES, PROJECTS, REUSE

ANSWER_LIFETIME = timedelta(days=1)
MAX_KEY_CHARACTERS = 255


class IdempotencyStore:
    """First answers to requests that carry an idempotency key.

    ::

        answer = idempotency.claim(project_id, key, digest, holder=holder)
        if answer is None:                      # the caller has to answer
            try: answer = do_it()
            except BaseException: idempotency.release(project_id, key, holder=holder); raise
            answer = idempotency.complete(project_id, key, answer, holder=holder)

    A claim belongs to its holder, a random text made for one attempt. Once its lease has run out,
    another may take it over; what the former holder does with the key then has no effect.
    """

    def __init__(self, database: Database, max_project_bytes: int | None = None) -> None:
        self._database = database
        self._max_project_bytes = max_project_bytes

    def claim(
        self,
        project_id: str,
        key: str,
        request_digest: str,
        *,
        holder: str,
        lease_s: float = 60.0,
    ) -> Answer | None:
        """Return the first answer; `None` if there is none and the caller has to answer.

        The digest is of the request's method, path and body. Without an answer for ``lease_s`` (its
        server died), another may claim the key.

        Raises:
            KeyReused: The key was used for another request.
            AnswerPending: Another request with the key is being answered.
            InvalidInput: The key is empty or too long.
        """
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
            "expires_at": now + ANSWER_LIFETIME,
        }
        with self._database.write() as connection:
            is_row = _is_row(project_id, key)
            lock_projects(connection, PROJECTS.c.id == project_id)
            delete_rows(connection, ANSWERS, is_row, ANSWERS.c.expires_at <= now)
            # The primary key decides: of two inserts at once, one returns no row.
            insert = self._database.insert(ANSWERS).values(**claim).on_conflict_do_nothing()
            if connection.execute(insert.returning(ANSWERS.c.key)).first() is not None:
                return None
            row = connection.execute(select(ANSWERS).where(is_row).with_for_update()).first()
            if row is None:
                raise AnswerPending(key)  # released between the two statements
            if row.request_digest != request_digest:
                raise KeyReused(key)
            if row.answer is not None:
                return Answer.model_validate_json(row.answer)
            if row.leased_until > now:
                raise AnswerPending(key)
            taken = update(ANSWERS).where(is_row)
            connection.execute(taken.values(holder=holder, leased_until=claim["leased_until"]))
            return None

    def renew(self, project_id: str, key: str, *, holder: str, lease_s: float) -> None:
        """Extend the lease of a claim whose answer is still being made."""
        until = self._database.now() + timedelta(seconds=lease_s)
        with self._database.write() as connection:
            held = update(ANSWERS).where(_is_held(project_id, key, holder))
            connection.execute(held.values(leased_until=until))

    def complete(self, project_id: str, key: str, answer: Answer, *, holder: str) -> Answer:
        """Store the answer for a day from its claim; return another's answer if it was first.

        Raises:
            AnswerPending: Another holder has taken the key over.
            StorageFull: The project has reached the size allowed; the answer counts while kept.
        """
        text = answer.model_dump_json()
        held = update(ANSWERS).where(_is_held(project_id, key, holder))
        with self._database.write() as connection:
            lock_projects(connection, PROJECTS.c.id == project_id)
            if connection.execute(held.values(answer=text)).rowcount:
                charge(connection, project_id, len(text), self._max_project_bytes)
            stored = select(ANSWERS.c.answer).where(_is_row(project_id, key))
            row = connection.execute(stored).first()
        if row is None:  # taken over and released since, or expired
            return answer
        if row.answer is None:
            raise AnswerPending(key)
        return Answer.model_validate_json(row.answer)

    def release(self, project_id: str, key: str, *, holder: str) -> None:
        """Give up a claim without an answer, so that the request can be retried."""
        with self._database.write() as connection:
            connection.execute(delete(ANSWERS).where(_is_held(project_id, key, holder)))


class ReuseStore:
    """Index of stored documents by the request they answer, so that no work is done twice."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def remember(self, project_id: str, kind: str, request_digest: str, result_id: str) -> None:
        """Note the id of a ``plan`` or ``profile``, replacing an earlier one.

        The digest is of everything the answer depends on, versions included.
        """
        with self._database.write() as connection:
            self.note(connection, project_id, kind, request_digest, result_id)

    def note(
        self,
        connection: Connection,
        project_id: str,
        kind: str,
        request_digest: str,
        result_id: str,
    ) -> None:
        """Note an answer as `remember` does, in the caller's transaction."""
        found = {"result_id": result_id, "created_at": self._database.now()}
        key = {"project_id": project_id, "kind": kind, "request_digest": request_digest}
        insert = self._database.insert(REUSE).values(**key, **found)
        connection.execute(insert.on_conflict_do_update(index_elements=list(key), set_=found))

    def recall(self, project_id: str, kind: str, request_digest: str) -> str | None:
        """Return the noted id if its document is still stored; else `None`."""
        is_stored = or_(  # retention may have removed the document
            *(
                exists().where(table.c.project_id == project_id, table.c.id == REUSE.c.result_id)
                for table in (PLANS, PROFILES)
            )
        )
        noted = select(REUSE.c.result_id).filter_by(
            project_id=project_id, kind=kind, request_digest=request_digest
        )
        with self._database.read() as connection:
            return connection.execute(noted.where(is_stored)).scalar()


def _is_row(project_id: str, key: str) -> ColumnElement[bool]:
    return and_(ANSWERS.c.project_id == project_id, ANSWERS.c.key == key)


def _is_held(project_id: str, key: str, holder: str) -> ColumnElement[bool]:
    """Match a claim that still belongs to this holder and has no answer."""
    unanswered = ANSWERS.c.answer.is_(None)
    return and_(_is_row(project_id, key), ANSWERS.c.holder == holder, unanswered)
