"""Projects and API keys in tables; see `contract.Projects` and `contract.Keys`."""

from __future__ import annotations

import builtins
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

from sqlalchemy import Row, select, update

from ...core.errors import InvalidInput
from .database import Database, new_id
from .errors import NotFound
from .records import ApiKey, NewApiKey, Project, Quotas
from .tables import API_KEYS, PROJECTS

MAX_NAME_CHARACTERS = 200
SECRET_PREFIX = "sw_"
"""Lets scanners of leaked secrets, and people, tell what it opens."""

KNOWN_S = 1.0
"""How long a key is not looked up again; so long one may work that another process revoked."""

MAX_FOUND = 10_000

USE_NOTED_EVERY = timedelta(minutes=1)
"""A write for every request would be the store's main work."""


class SqlProjects:
    """`contract.Projects` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str) -> Project:
        _check_name(name)
        values = {"id": new_id("project"), "created_at": self._database.now(), "name": name}
        insert = self._database.insert(PROJECTS).values(**values).on_conflict_do_nothing()
        with self._database.write() as connection:
            row = connection.execute(insert.returning(PROJECTS)).first()
        if row is None:
            raise InvalidInput(f"there is a project {name!r} already", field="/name")
        return _project(row)

    def get(self, project_id: str) -> Project:
        with self._database.read() as connection:
            row = connection.execute(select(PROJECTS).where(PROJECTS.c.id == project_id)).first()
        if row is None:
            raise NotFound("project", project_id)
        return _project(row)

    def list(self) -> Sequence[Project]:
        with self._database.read() as connection:
            rows = connection.execute(select(PROJECTS).order_by(PROJECTS.c.position)).all()
        return [_project(row) for row in rows]


class SqlKeys:
    """`contract.Keys` on a database."""

    def __init__(
        self, database: Database, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._monotonic_s = monotonic_s
        self._found: dict[str, tuple[float, ApiKey]] = {}
        self._num_revoked = 0
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
        _check_name(name)
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        values = {
            "project_id": project_id,
            "id": new_id("key"),
            "created_at": self._database.now(),
            "name": name,
            "secret_digest": secret_digest(secret),
            "scopes": json.dumps(list(scopes)),
            "quotas": (quotas or Quotas()).model_dump_json(),
            "expires_at": expires_at,
        }
        with self._database.write() as connection:
            known = select(PROJECTS.c.id).where(PROJECTS.c.id == project_id)
            if connection.execute(known).first() is None:
                raise NotFound("project", project_id)
            insert = self._database.insert(API_KEYS).values(**values)
            row = connection.execute(insert.returning(API_KEYS)).one()
        return NewApiKey(key=_key(row), secret=secret)

    def by_secret(self, secret: str) -> ApiKey | None:
        begin_s, num_revoked = self._monotonic_s(), self._num_revoked
        now, digest = self._database.now(), secret_digest(secret)
        wanted = select(API_KEYS).where(API_KEYS.c.secret_digest == digest)
        with self._database.read() as connection:
            row = connection.execute(wanted).first()
        if row is None:
            return None
        key = _key(row)
        if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
            return None
        if key.last_used_at is None or now - key.last_used_at >= USE_NOTED_EVERY:
            self._set(API_KEYS.c.id == key.id, last_used_at=now)
        with self._lock:
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            if num_revoked == self._num_revoked:  # else it may be this one
                self._found[digest] = (begin_s, key)
        return key

    def known(self, secret: str) -> ApiKey | None:
        found_s, key = self._found.get(secret_digest(secret), (0.0, None))
        if key is None or self._monotonic_s() - found_s >= KNOWN_S:
            return None
        if key.expires_at is not None and key.expires_at <= self._database.now():
            return None
        return key

    def list(self, project_id: str) -> Sequence[ApiKey]:
        rows = select(API_KEYS).where(API_KEYS.c.project_id == project_id)
        with self._database.read() as connection:
            found = connection.execute(rows.order_by(API_KEYS.c.position)).all()
        return [_key(row) for row in found]

    def revoke(self, project_id: str, key_id: str) -> ApiKey:
        mine = (API_KEYS.c.project_id == project_id) & (API_KEYS.c.id == key_id)
        self._set(mine & API_KEYS.c.revoked_at.is_(None), revoked_at=self._database.now())
        with self._lock:
            self._num_revoked += 1
            self._found.clear()
        with self._database.read() as connection:
            row = connection.execute(select(API_KEYS).where(mine)).first()
        if row is None:
            raise NotFound("API key", key_id)
        return _key(row)

    def _set(self, which: Any, **values: datetime) -> None:
        with self._database.write() as connection:
            connection.execute(update(API_KEYS).where(which).values(**values))


def secret_digest(secret: str) -> str:
    """What is kept of a secret: it has 256 random bits, so no slow hash is needed."""
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
