"""Stored projects: their size, their API keys and the audit log."""

from __future__ import annotations

import builtins
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from ...core.errors import InvalidInput
from .database import Database, new_id
from .errors import RecordNotFound, StorageFull
from .records import ApiKey, AuditEntry, AuditEvent, NewApiKey, Page, Project, Quotas
from .tables import ANSWERS, API_KEYS, AUDIT, GRAPHS, PLANS, PROFILES, PROJECTS

MAX_NAME_CHARACTERS = 200
SECRET_PREFIX = "sw_"
"""Lets people and secret scanners recognise a leaked key."""

CACHE_LIFETIME_S = 1.0
"""How long a key is not looked up again, and so may outlive its revocation by another process."""

MAX_CACHED_KEYS = 10_000

USE_RECORDED_EVERY = timedelta(minutes=1)
"""A write for every request would be the store's main work."""

COUNTED = {
    PROFILES: PROFILES.c.document,
    GRAPHS: GRAPHS.c.document,
    PLANS: PLANS.c.document,
    ANSWERS: ANSWERS.c.answer,
}
"""The texts whose size counts, by table; an answer that is still being made has none."""


class ProjectStore:
    """Owners of everything else; `records.DEFAULT_PROJECT` always exists."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str) -> Project:
        """Add a project. Raises: InvalidInput."""
        _check_name(name)
        values = {"id": new_id("project"), "created_at": self._database.now(), "name": name}
        new = self._database.insert(PROJECTS).values(**values).on_conflict_do_nothing()
        with self._database.write() as connection:
            row = connection.execute(new.returning(PROJECTS)).first()
        if row is None:
            raise InvalidInput(f"there is a project {name!r} already", field="/name")
        return _project(row)

    def get(self, project_id: str) -> Project:
        """Return a project. Raises: RecordNotFound."""
        with self._database.read() as connection:
            row = connection.execute(select(PROJECTS).where(PROJECTS.c.id == project_id)).first()
        if row is None:
            raise RecordNotFound("project", project_id)
        return _project(row)

    def list(self) -> Sequence[Project]:
        """Return every project, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(PROJECTS).order_by(PROJECTS.c.position)).all()
        return [_project(row) for row in rows]


class KeyStore:
    """API keys; of a secret only its hash is stored."""

    def __init__(
        self, database: Database, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._monotonic_s = monotonic_s
        self._cache: dict[str, tuple[float, ApiKey]] = {}
        self._num_revocations = 0
        self._lock = Lock()

    def create(
        self,
        project_id: str,
        *,
        name: str,
        scopes: Sequence[str],
        quotas: Quotas | None = None,
        expires_at: datetime | None = None,
    ) -> NewApiKey:
        """Create a key and return it with its secret, which cannot be had again.

        Raises: RecordNotFound.
        """
        _check_name(name)
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        values = {
            "project_id": project_id,
            "id": new_id("key"),
            "created_at": self._database.now(),
            "name": name,
            "secret_digest": hash_secret(secret),
            "scopes": json.dumps(list(scopes)),
            "quotas": (quotas or Quotas()).model_dump_json(),
            "expires_at": expires_at,
        }
        with self._database.write() as connection:
            project = select(PROJECTS.c.id).where(PROJECTS.c.id == project_id)
            if connection.execute(project).first() is None:
                raise RecordNotFound("project", project_id)
            row = connection.execute(insert(API_KEYS).values(**values).returning(API_KEYS)).one()
        return NewApiKey(key=_key(row), secret=secret)

    def by_secret(self, secret: str) -> ApiKey | None:
        """Return the key with that secret unless it is unknown, revoked or expired.

        The use is recorded, about once a minute.
        """
        begin_s, num_revocations = self._monotonic_s(), self._num_revocations
        digest = hash_secret(secret)
        key = self._read_live(API_KEYS.c.secret_digest == digest)
        if key is None:
            return None
        with self._lock:
            if len(self._cache) >= MAX_CACHED_KEYS:
                self._cache.clear()
            # A revocation since the read began may be of this key: then it must not be cached.
            if num_revocations == self._num_revocations:
                self._cache[digest] = (begin_s, key)
        return key

    def by_id(self, key_id: str) -> ApiKey | None:
        """Return the key with that id unless it is unknown, revoked or expired.

        Never cached: a browser's session ends with the first request after the key is revoked,
        whichever server that asks and whichever revoked it.
        """
        return self._read_live(API_KEYS.c.id == key_id)

    def _read_live(self, which: ColumnElement[bool]) -> ApiKey | None:
        now = self._database.now()
        with self._database.read() as connection:
            row = connection.execute(select(API_KEYS).where(which)).first()
        if row is None:
            return None
        key = _key(row)
        if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
            return None
        if key.last_used_at is None or now - key.last_used_at >= USE_RECORDED_EVERY:
            self._update(API_KEYS.c.id == key.id, last_used_at=now)
        return key

    def known(self, secret: str) -> ApiKey | None:
        """Return the key as `by_secret` found it less than a second ago; never blocks.

        `None` says nothing about the key. A key that this store revoked is never returned; one
        that another process revoked in the last second may be.
        """
        found_s, key = self._cache.get(hash_secret(secret), (0.0, None))
        if key is None or self._monotonic_s() - found_s >= CACHE_LIFETIME_S:
            return None
        if key.expires_at is not None and key.expires_at <= self._database.now():
            return None
        return key

    def list(self, project_id: str) -> Sequence[ApiKey]:
        """Return every key of a project, oldest first, revoked ones included."""
        rows = select(API_KEYS).where(API_KEYS.c.project_id == project_id)
        with self._database.read() as connection:
            found = connection.execute(rows.order_by(API_KEYS.c.position)).all()
        return [_key(row) for row in found]

    def page(self, project_id: str, *, limit: int, cursor: str | None) -> Page[ApiKey]:
        """Return a page of a project's keys, newest first."""
        rows = select(API_KEYS).where(API_KEYS.c.project_id == project_id)
        return self._database.fetch_page(rows, API_KEYS, _key, limit=limit, cursor=cursor)

    def count_live(self, project_id: str) -> int:
        """Return the number of a project's keys that are neither revoked nor expired."""
        mine = (
            API_KEYS.c.project_id == project_id,
            API_KEYS.c.revoked_at.is_(None),
            or_(API_KEYS.c.expires_at.is_(None), API_KEYS.c.expires_at > self._database.now()),
        )
        with self._database.read() as connection:
            return connection.execute(
                select(func.count()).select_from(API_KEYS).where(*mine)
            ).scalar_one()

    def revoke(self, project_id: str, key_id: str) -> ApiKey:
        """Revoke a key for good; revoking it again changes nothing. Raises: RecordNotFound."""
        is_key = (API_KEYS.c.project_id == project_id) & (API_KEYS.c.id == key_id)
        self._update(is_key & API_KEYS.c.revoked_at.is_(None), revoked_at=self._database.now())
        with self._lock:  # after the write: nothing older can be cached from here on
            self._num_revocations += 1
            self._cache.clear()
        with self._database.read() as connection:
            row = connection.execute(select(API_KEYS).where(is_key)).first()
        if row is None:
            raise RecordNotFound("API key", key_id)
        return _key(row)

    def _update(self, condition: ColumnElement[bool], **values: datetime) -> None:
        with self._database.write() as connection:
            connection.execute(update(API_KEYS).where(condition).values(**values))


class AuditLog:
    """Log of actions and their authors; only retention removes lines, and nothing changes one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: AuditEvent) -> None:
        """Append a line."""
        values = {**dict(event), "details_json": json.dumps(event.details)}
        del values["details"]
        with self._database.write() as connection:
            connection.execute(insert(AUDIT).values(created_at=self._database.now(), **values))

    def entries(
        self, *, project_id: str | None = None, limit: int, cursor: str | None = None
    ) -> Page[AuditEntry]:
        """Return lines of one project or of all, newest first."""
        rows = select(AUDIT)
        if project_id is not None:
            rows = rows.where(AUDIT.c.project_id == project_id)
        return self._database.fetch_page(rows, AUDIT, _entry, limit=limit, cursor=cursor)


def _entry(row: Row[Any]) -> AuditEntry:
    values = dict(row._mapping)
    details = json.loads(values.pop("details_json"))
    return AuditEntry(number=values.pop("position"), details=details, **values)


def hash_secret(secret: str) -> str:
    """Return a secret's hash; with 256 random bits it needs neither salt nor a slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _check_name(name: str) -> None:
    if not name.strip() or len(name) > MAX_NAME_CHARACTERS:
        raise InvalidInput(
            f"a name has 1 to {MAX_NAME_CHARACTERS} characters, not {len(name)}", field="/name"
        )


def _project(row: Row[Any]) -> Project:
    return Project(id=row.id, created_at=row.created_at, name=row.name)


def _key(row: Row[Any]) -> ApiKey:
    values = {name: row._mapping[name] for name in ApiKey.model_fields}
    scopes: builtins.list[str] = json.loads(row.scopes)
    return ApiKey.model_validate(
        {**values, "scopes": tuple(scopes), "quotas": Quotas.model_validate_json(row.quotas)}
    )


def charge(connection: Connection, project_id: str, size: int, limit: int | None = None) -> None:
    """Add the size of a document or answer, in characters, to the size of its project.

    The lock on the project's row comes before that on any counted row: two transactions that take
    both cannot wait for each other.

    Raises:
        StorageFull: The project would have more than ``limit``.
    """
    change = update(PROJECTS).where(PROJECTS.c.id == project_id)
    change = change.values(stored_size=PROJECTS.c.stored_size + size)
    stored = connection.execute(change.returning(PROJECTS.c.stored_size)).scalar()
    if limit is not None and stored is not None and stored > limit:
        raise StorageFull(size, limit, stored - size)


def delete_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> int:
    """Delete rows of any table; return their number. They no longer count afterwards."""
    doomed = delete(table).where(*conditions)
    if table not in COUNTED:
        return connection.execute(doomed).rowcount
    size = func.coalesce(func.length(COUNTED[table]), 0).label("size")
    rows = connection.execute(doomed.returning(table.c.project_id, size)).all()
    freed: Counter[str] = Counter()
    for row in rows:
        freed[row.project_id] += row.size
    for project_id in sorted(freed):
        charge(connection, project_id, -freed[project_id])
    return len(rows)


def lock_projects(connection: Connection, *conditions: ColumnElement[bool]) -> None:
    """Take the locks on projects before those on their counted rows; see `charge`."""
    rows = select(PROJECTS.c.id).where(*conditions).order_by(PROJECTS.c.id)
    connection.execute(rows.with_for_update(key_share=True)).all()
