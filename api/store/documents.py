"""Stored profiles, graphs and plan records."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, or_, select

from ...core.cluster.shorthand import format_devices
from ...core.document import Record
from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import (
    GraphSummary,
    PlanRecord,
    PlanSummary,
    ProfileSummary,
    StoredGraph,
    StoredPlan,
    StoredProfile,
)
from .database import Database
from .errors import RecordNotFound
from .idempotency import remember
from .pagination import fetch_page
from .records import Page, Stored
from .tables import GRAPHS, PLANS, PROFILES

Summary = TypeVar("Summary", bound=Record)
Value = TypeVar("Value")

CACHED_CHARACTERS = 16 * 2**20
"""JSON length of the profiles kept parsed; in memory they take several times as much."""

MAX_INTEGER = 2**63 - 1
"""Largest value of a BIGINT column."""

MAX_SEARCH_WORDS = 8
"""Every word is looked for in every searched column."""

PROFILE_FIELDS = frozenset({"model", "family", "num_layers", "num_parameters"})
SUMMARY_COLUMNS = {
    name: (PROFILES if name in PROFILE_FIELDS else PLANS).c[name]
    for name in PlanSummary.model_fields
}
SEARCHED = ("id", "model", "family", "devices", "schedule", "status")


class DocumentStore:
    """Profiles, graphs and plan records, each stored under the id derived from its content.

    Documents never change. Storing equal content again in one project returns the existing row,
    its ``created_at`` included; in another project it becomes a row of its own under the same id.
    Lists are newest first, and rows added while a client pages through are neither repeated nor
    do they hide others. Lists raise `InvalidInput` for a cursor of any other list.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._parsed: LruCache[Profile] = LruCache(CACHED_CHARACTERS)

    def put_profile(self, project_id: str, profile: Profile) -> Stored:
        """Store a profile under its ``content_id()``."""
        with self._database.write() as connection:
            return _stored(self.insert_profile(connection, project_id, profile))

    def put_graph(self, project_id: str, graph: Graph) -> Stored:
        """Store a graph under its ``content_id()``."""
        with self._database.write() as connection:
            return _stored(self.insert_graph(connection, project_id, graph))

    def put_plan(
        self, project_id: str, record: PlanRecord, *, request_digest: str | None = None
    ) -> StoredPlan:
        """Store a plan record under its ``record_id()``.

        With a digest, also note it as the answer to that request (`ReuseStore.remember`).

        Raises:
            RecordNotFound: Its profile is not stored in that project.
        """
        with self._database.write() as connection:
            row = self.insert_plan(connection, project_id, record)
            if request_digest is not None:
                remember(connection, self._database, project_id, "plan", request_digest, row.id)
        return StoredPlan(id=row.id, created_at=row.created_at, **dict(record))

    def profile(self, project_id: str, profile_id: str) -> StoredProfile:
        """Return a profile. Raises: RecordNotFound."""
        row = self._row(PROFILES, project_id, profile_id, "id", "created_at")
        profile = self._parsed.get(profile_id)  # ids are content hashes: equal in every project
        if profile is None:
            text = self._row(PROFILES, project_id, profile_id, "document").document
            profile = Profile.model_validate_json(text)
            self._parsed.put(profile_id, profile, len(text))
        # The profile was validated when it was parsed; validating it again would take longer
        # than everything else here.
        return StoredProfile.model_construct(id=row.id, created_at=row.created_at, profile=profile)

    def graph(self, project_id: str, graph_id: str) -> StoredGraph:
        """Return a graph. Raises: RecordNotFound."""
        row = self._row(GRAPHS, project_id, graph_id)
        graph = Graph.model_validate_json(row.document)
        return StoredGraph(id=row.id, created_at=row.created_at, graph=graph)

    def plan(self, project_id: str, plan_id: str) -> StoredPlan:
        """Return a plan record. Raises: RecordNotFound."""
        row = self._row(PLANS, project_id, plan_id)
        record = PlanRecord.model_validate_json(row.document)
        return StoredPlan(id=row.id, created_at=row.created_at, **dict(record))

    # The JSON methods join stored text instead of parsing and dumping it, which takes seconds for
    # a large document. A `Stored` document begins with its id and time; then follows the rest.

    def profile_json(self, project_id: str, profile_id: str) -> str:
        """Return the JSON of `profile` as it was stored. Raises: RecordNotFound."""
        row = self._row(PROFILES, project_id, profile_id)
        return _join_json(row, f'"profile":{row.document}}}')

    def graph_json(self, project_id: str, graph_id: str) -> str:
        """Return the JSON of `graph` as it was stored. Raises: RecordNotFound."""
        row = self._row(GRAPHS, project_id, graph_id)
        return _join_json(row, f'"graph":{row.document}}}')

    def plan_json(self, project_id: str, plan_id: str) -> str:
        """Return the JSON of `plan` as it was stored. Raises: RecordNotFound."""
        row = self._row(PLANS, project_id, plan_id)
        return _join_json(row, row.document[1:])

    def profile_summary(self, project_id: str, profile_id: str) -> ProfileSummary:
        """Return a profile's line in lists. Raises: RecordNotFound."""
        row = self._row(PROFILES, project_id, profile_id, *ProfileSummary.model_fields)
        return ProfileSummary.model_validate(dict(row._mapping))

    def plan_summary(self, project_id: str, plan_id: str) -> PlanSummary:
        """Return a plan's line in lists. Raises: RecordNotFound."""
        with self._database.read() as connection:
            wanted = select_plan_summaries(project_id, "").where(PLANS.c.id == plan_id)
            row = connection.execute(wanted).first()
        if row is None:
            raise RecordNotFound("plan", plan_id)
        return _plan_summary(row)

    def profiles(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[ProfileSummary]:
        """Return at most ``limit`` profiles."""
        return self._list(PROFILES, ProfileSummary, project_id, limit, cursor)

    def graphs(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[GraphSummary]:
        """Return at most ``limit`` graphs."""
        return self._list(GRAPHS, GraphSummary, project_id, limit, cursor)

    def plans(
        self, project_id: str, *, limit: int, cursor: str | None = None, search: str = ""
    ) -> Page[PlanSummary]:
        """Return at most ``limit`` plan records.

        A search selects records that contain each of its words, in either case, in their id,
        model, family, devices, schedule or status.
        """
        rows = select_plan_summaries(project_id, search)
        with self._database.read() as connection:
            return fetch_page(connection, rows, PLANS, _plan_summary, limit=limit, cursor=cursor)

    # The insert methods work inside a caller's transaction: a job stores all its results at once.

    def insert_profile(self, connection: Connection, project_id: str, profile: Profile) -> Row[Any]:
        """Insert a profile in the caller's transaction."""
        identifier, text = profile.content_id(), profile.to_json()
        self._parsed.put(identifier, profile, len(text))  # usually planned from right away
        values = {
            "id": identifier,
            "model": profile.model,
            "num_layers": len(profile.layers),
            "estimated": profile.provenance.source == "estimated",
            "family": profile.spec.family if profile.spec else None,
            "num_parameters": num_parameters(profile),
            "document": text,
        }
        return self._insert(connection, PROFILES, project_id, values)

    def insert_graph(self, connection: Connection, project_id: str, graph: Graph) -> Row[Any]:
        """Insert a graph in the caller's transaction."""
        values = {
            "id": graph.content_id(),
            "model": graph.model,
            "num_layers": len(graph.layers),
            "document": graph.to_json(),
        }
        return self._insert(connection, GRAPHS, project_id, values)

    def insert_plan(self, connection: Connection, project_id: str, record: PlanRecord) -> Row[Any]:
        """Insert a plan record in the caller's transaction. Raises: RecordNotFound."""
        profile = select(PROFILES.c.id).where(_is_row(PROFILES, project_id, record.profile_id))
        # A shared lock, so that retention cannot delete the profile before the plan is stored.
        if connection.execute(profile.with_for_update(read=True)).first() is None:
            raise RecordNotFound("profile", record.profile_id)
        plan = record.plan
        values = {
            "id": record.record_id(),
            "profile_id": record.profile_id,
            "status": record.status,
            "model": plan.model if plan else None,
            "num_stages": plan.num_stages if plan else None,
            "step_time_s": plan.step_time_s if plan else None,
            "devices": format_devices(record.cluster),
            "schedule": plan.schedule if plan else record.options.schedule,
            "document": record.model_dump_json(),
        }
        return self._insert(connection, PLANS, project_id, values)

    def _insert(
        self, connection: Connection, table: Table, project_id: str, values: dict[str, Any]
    ) -> Row[Any]:
        """Insert a row unless the id exists; return id and time of the row now stored."""
        insert = self._database.insert(table).values(
            project_id=project_id, created_at=self._database.now(), **values
        )
        connection.execute(insert.on_conflict_do_nothing(index_elements=["project_id", "id"]))
        stored: Select[Any] = select(table.c.id, table.c.created_at)
        return connection.execute(stored.where(_is_row(table, project_id, values["id"]))).one()

    def _row(self, table: Table, project_id: str, identifier: str, *columns: str) -> Row[Any]:
        names = columns or ("id", "created_at", "document")
        wanted = select(*(table.c[name] for name in names))
        with self._database.read() as connection:
            row = connection.execute(wanted.where(_is_row(table, project_id, identifier))).first()
        if row is None:
            raise RecordNotFound(table.name.removesuffix("s"), identifier)
        return row

    def _list(
        self,
        table: Table,
        summary: type[Summary],
        project_id: str,
        limit: int,
        cursor: str | None,
    ) -> Page[Summary]:
        names = tuple(summary.model_fields)
        rows = select(table.c.position, *(table.c[name] for name in names))

        def as_summary(row: Row[Any]) -> Summary:
            return summary.model_validate({name: row._mapping[name] for name in names})

        with self._database.read() as connection:
            mine = rows.where(table.c.project_id == project_id)
            return fetch_page(connection, mine, table, as_summary, limit=limit, cursor=cursor)


def num_parameters(profile: Profile) -> int | None:
    """Return a model's number of parameters, tied ones counted once; `None` if not listed."""
    listed = sum(one.numel for one in profile.parameters if one.kind == "parameter")
    return listed if 0 < listed <= MAX_INTEGER else None


def _is_row(table: Table, project_id: str, identifier: str) -> ColumnElement[bool]:
    return and_(table.c.project_id == project_id, table.c.id == identifier)


def _stored(row: Row[Any]) -> Stored:
    return Stored(id=row.id, created_at=row.created_at)


def _join_json(row: Row[Any], rest: str) -> str:
    """Return the JSON of a `Stored` row followed by further fields and the closing brace."""
    return f"{_stored(row).model_dump_json()[:-1]},{rest}"


def select_plan_summaries(project_id: str, search: str) -> Select[Any]:
    """Select a project's plans that contain every word of a search, in no order."""
    profile_of_plan = and_(
        PLANS.c.project_id == PROFILES.c.project_id, PLANS.c.profile_id == PROFILES.c.id
    )
    rows = (
        select(PLANS.c.position, *SUMMARY_COLUMNS.values())
        .join_from(PLANS, PROFILES, profile_of_plan)
        .where(PLANS.c.project_id == project_id)
    )
    for word in search.replace("\0", " ").split()[:MAX_SEARCH_WORDS]:
        columns = (SUMMARY_COLUMNS[name] for name in SEARCHED)
        rows = rows.where(or_(*(column.icontains(word, autoescape=True) for column in columns)))
    return rows


def _plan_summary(row: Row[Any]) -> PlanSummary:
    values = row[1:]  # the first column is the position
    return PlanSummary.model_validate(dict(zip(SUMMARY_COLUMNS, values, strict=True)))


class LruCache(Generic[Value]):
    """A thread-safe cache of immutable values, of which the least recently used are dropped first.

    Args:
        capacity: Total size of all values, in the unit passed to `put`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, key: str) -> Value | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, value: Value, size: int) -> None:
        """Add a value and drop old ones to make room; one beyond the capacity is not kept."""
        if size > self._capacity:
            return
        with self._lock:
            _, replaced_size = self._entries.pop(key, (None, 0))
            self._size += size - replaced_size
            self._entries[key] = (value, size)
            while self._size > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size -= freed
