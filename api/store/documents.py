"""Stored profiles, graphs and plan records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from threading import Lock
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    func,
    or_,
    select,
    update,
)

from ...core.cluster.shorthand import format_devices
from ...core.document import DIGEST_DIGITS, Record
from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import (
    GraphSummary,
    PlanLabels,
    PlanRecord,
    PlanSummary,
    ProfileSummary,
    StoredGraph,
    StoredPlan,
    StoredProfile,
)
from .database import Database
from .errors import ProfileInUse, RecordNotFound
from .idempotency import ReuseStore
from .projects import charge, delete_rows, lock_projects
from .records import Page, Stored, read_stored
from .tables import GRAPHS, PLANS, PROFILES, PROJECTS

Summary = TypeVar("Summary", bound=Record)
Kind = Literal["profile", "graph", "plan"]


class PlanHead(PlanLabels, Stored):
    """Header of a `StoredPlan`: all of it but the record, which follows."""


CheckTag = Callable[[str], object]
"""Raises if a document with this entity tag may not be changed."""

PLAN_HEAD, STORED_HEAD = tuple(PlanHead.model_fields), tuple(Stored.model_fields)
HEADS = {"profile": STORED_HEAD, "graph": STORED_HEAD, "plan": PLAN_HEAD}
"""Columns in front of each kind's document."""

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
TABLES = {"profile": PROFILES, "graph": GRAPHS, "plan": PLANS}
SEARCHED = ("id", "model", "family", "devices", "schedule", "status", "name", "tags")


class DocumentStore:
    """Profiles, graphs and plan records, each stored under the id derived from its content.

    Documents never change; plans have labels beside them, which may. Storing equal content again in
    one project returns the existing row, its ``created_at`` and labels included; in another project
    it becomes a row of its own under the same id. Lists are newest first, and rows added while a
    client pages through are neither repeated nor do they hide others. Lists raise `InvalidInput`
    for a cursor of any other list.
    """

    def __init__(
        self, database: Database, reuse: ReuseStore, max_project_bytes: int | None = None
    ) -> None:
        self._database, self._reuse = database, reuse
        self._max_project_bytes = max_project_bytes
        self._parsed = ProfileCache(CACHED_CHARACTERS)

    def put(self, project_id: str, document: Profile | Graph) -> Stored:
        """Store a profile or graph under its ``content_id()``."""
        with self._database.write() as connection:
            return _stored(self.insert(connection, project_id, document))

    def put_plan(
        self, project_id: str, record: PlanRecord, *, request_digest: str | None = None
    ) -> StoredPlan:
        """Store a plan record under its ``record_id()``.

        With a digest, also note it as the answer to that request (`ReuseStore.remember`).

        Raises:
            RecordNotFound: Its profile is not stored in that project.
        """
        with self._database.write() as connection:
            row = self.insert(connection, project_id, record)
            if request_digest is not None:
                self._reuse.note(connection, project_id, "plan", request_digest, row.id)
        return StoredPlan(**_plan_head(row), **dict(record))

    def profile(self, project_id: str, profile_id: str) -> StoredProfile:
        """Return a profile. Raises: RecordNotFound, InvalidInput (see `read_stored`)."""
        row = self._row(PROFILES, project_id, profile_id, "id", "created_at")
        profile = self._parsed.get(profile_id)  # ids are content hashes: equal in every project
        if profile is None:
            text = self._row(PROFILES, project_id, profile_id, "document").document
            profile = read_stored(Profile, text, profile_id)
            self._parsed.put(profile_id, profile, len(text))
        # The profile was validated when it was parsed; validating it again would take longer
        # than everything else here.
        return StoredProfile.model_construct(id=row.id, created_at=row.created_at, profile=profile)

    def graph(self, project_id: str, graph_id: str) -> StoredGraph:
        """Return a graph. Raises: RecordNotFound, InvalidInput (see `read_stored`)."""
        row = self._row(GRAPHS, project_id, graph_id)
        graph = read_stored(Graph, row.document, graph_id)
        return StoredGraph(id=row.id, created_at=row.created_at, graph=graph)

    def plan(self, project_id: str, plan_id: str) -> StoredPlan:
        """Return a plan record. Raises: RecordNotFound, InvalidInput (see `read_stored`)."""
        row = self._row(PLANS, project_id, plan_id, *PLAN_HEAD, "document")
        record = read_stored(PlanRecord, row.document, plan_id)
        return StoredPlan(**_plan_head(row), **dict(record))

    def json(self, kind: Kind, project_id: str, identifier: str) -> str:
        """Return a document as it was stored, as JSON. Raises: RecordNotFound."""
        return self.tagged_json(kind, project_id, identifier)[1]

    def tagged_json(self, kind: Kind, project_id: str, identifier: str) -> tuple[str, str]:
        """Return a document's entity tag and its JSON. Raises: RecordNotFound.

        Stored text is joined instead of parsed and dumped, which takes seconds for a large
        document. A `Stored` document begins with its id and time, a plan also with its labels;
        then follows the rest.
        """
        row = self._row(TABLES[kind], project_id, identifier, *HEADS[kind], "document")
        head = _head_json(kind, row)
        rest = row.document[1:] if kind == "plan" else f'"{kind}":{row.document}}}'
        return _entity_tag(head), f"{head[:-1]},{rest}"

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

    def label_plan(
        self,
        project_id: str,
        plan_id: str,
        changes: Mapping[str, Any],
        check_tag: CheckTag = str,
    ) -> PlanSummary:
        """Change the given `PlanLabels` of a plan, by name. Raises: RecordNotFound."""
        values = {**changes}
        if "tags" in values:
            values["tags"] = " ".join(values["tags"])
        this = _is_row(PLANS, project_id, plan_id)
        with self._database.write() as connection:
            _lock(connection, "plan", this, plan_id, check_tag)
            if values:
                connection.execute(update(PLANS).where(this).values(**values))
        return self.plan_summary(project_id, plan_id)

    def delete(
        self, kind: Kind, project_id: str, identifier: str, check_tag: CheckTag = str
    ) -> None:
        """Delete a document.

        Raises:
            RecordNotFound: There is none.
            ProfileInUse: It is a profile that plans name.
        """
        table = TABLES[kind]
        this = _is_row(table, project_id, identifier)
        with self._database.write() as connection:
            lock_projects(connection, PROJECTS.c.id == project_id)
            # The lock comes before the plans are counted: whoever stores one locks its profile,
            # too (see `insert`), and has ended or not begun once this transaction has the row.
            row = _lock(connection, kind, this, identifier, check_tag)
            if table is PROFILES:
                named = (PLANS.c.project_id == project_id) & (PLANS.c.profile_id == row.id)
                plans = select(func.count(), func.max(PLANS.c.id)).where(named)
                num_plans, plan_id = connection.execute(plans).one()
                if num_plans:
                    raise ProfileInUse(identifier, num_plans, plan_id)
            delete_rows(connection, table, this)

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
        name, tags, model, family, devices, schedule or status.
        """
        rows = select_plan_summaries(project_id, search)
        return self._database.fetch_page(rows, PLANS, _plan_summary, limit=limit, cursor=cursor)

    def insert(
        self, connection: Connection, project_id: str, document: Profile | Graph | PlanRecord
    ) -> Row[Any]:
        """Insert a document unless its id exists; return id and time of the row now stored.

        In the caller's transaction: a job stores all its results at once.

        Raises:
            RecordNotFound: It is a plan whose profile is not stored in that project.
            StorageFull: The project's documents have reached the size allowed.
        """
        lock_projects(connection, PROJECTS.c.id == project_id)
        match document:
            case Profile():
                table, values = PROFILES, _profile_columns(document)
                # Usually planned from right away.
                self._parsed.put(values["id"], document, len(values["document"]))
            case Graph():
                table, values = GRAPHS, _graph_columns(document)
            case _:
                table, values = PLANS, _plan_columns(document)
                wanted = select(PROFILES.c.id).where(
                    _is_row(PROFILES, project_id, document.profile_id)
                )
                # A shared lock, so that retention cannot delete the profile before the plan is
                # stored.
                profile = connection.execute(wanted.with_for_update(read=True)).first()
                if profile is None:
                    raise RecordNotFound("profile", document.profile_id)
        names = PLAN_HEAD if table is PLANS else STORED_HEAD
        stored: Select[Any] = select(*(table.c[name] for name in names))
        stored = stored.where(_is_row(table, project_id, values["id"]))
        known = connection.execute(stored).first()
        if known is not None:
            return known
        insert = self._database.insert(table).values(
            project_id=project_id, created_at=self._database.now(), **values
        )
        insert = insert.on_conflict_do_nothing(index_elements=["project_id", "id"])
        if connection.execute(insert.returning(table.c.id)).first() is not None:
            charge(connection, project_id, len(values["document"]), self._max_project_bytes)
        return connection.execute(stored).one()

    def _row(self, table: Table, project_id: str, identifier: str, *columns: str) -> Row[Any]:
        names = columns or (*STORED_HEAD, "document")
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

        mine = rows.where(table.c.project_id == project_id)
        return self._database.fetch_page(mine, table, as_summary, limit=limit, cursor=cursor)


def _profile_columns(profile: Profile) -> dict[str, Any]:
    # Tied parameters are listed once; without a list the number is unknown.
    num_parameters = sum(one.numel for one in profile.parameters if one.kind == "parameter")
    return {
        "id": profile.content_id(),
        "model": profile.model,
        "num_layers": len(profile.layers),
        "estimated": profile.provenance.source == "estimated",
        "family": profile.spec.family if profile.spec else None,
        "num_parameters": num_parameters if 0 < num_parameters <= MAX_INTEGER else None,
        "document": profile.to_json(),
    }


def _graph_columns(graph: Graph) -> dict[str, Any]:
    return {
        "id": graph.content_id(),
        "model": graph.model,
        "num_layers": len(graph.layers),
        "document": graph.to_json(),
    }


def _plan_columns(record: PlanRecord) -> dict[str, Any]:
    plan = record.plan
    return {
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


def _is_row(table: Table, project_id: str, identifier: str) -> ColumnElement[bool]:
    return and_(table.c.project_id == project_id, table.c.id == identifier)


def _plan_head(row: Row[Any]) -> dict[str, Any]:
    values = {name: row._mapping[name] for name in PLAN_HEAD}
    return {**values, "tags": _read_tags(row.tags)}


def _read_tags(joined: str | None) -> tuple[str, ...]:
    return tuple((joined or "").split())


def _lock(
    connection: Connection,
    kind: Kind,
    this: ColumnElement[bool],
    identifier: str,
    check_tag: CheckTag,
) -> Row[Any]:
    """Lock a document, and have its entity tag checked. Raises: RecordNotFound."""
    wanted = select(*(TABLES[kind].c[name] for name in HEADS[kind])).where(this)
    row = connection.execute(wanted.with_for_update()).first()
    if row is None:
        raise RecordNotFound(kind, identifier)
    check_tag(_entity_tag(_head_json(kind, row)))
    return row


def _head_json(kind: Kind, row: Row[Any]) -> str:
    head = PlanHead(**_plan_head(row)) if kind == "plan" else _stored(row)
    return head.model_dump_json()


def _entity_tag(head: str) -> str:
    """Return the tag of the document with this head: the rest of it never changes."""
    return sha256(head.encode()).hexdigest()[:DIGEST_DIGITS]


def _stored(row: Row[Any]) -> Stored:
    return Stored(id=row.id, created_at=row.created_at)


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
    columns = row[1:]  # the first column is the position
    values: dict[str, Any] = dict(zip(SUMMARY_COLUMNS, columns, strict=True))
    values["tags"] = _read_tags(values["tags"])
    return PlanSummary.model_validate(values)


class ProfileCache:
    """A thread-safe cache of profiles, of which the least recently used are dropped first.

    The capacity is the total size of all, in the unit passed to `put`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[Profile, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, key: str) -> Profile | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, profile: Profile, size: int) -> None:
        """Add a profile and drop old ones to make room; one beyond the capacity is not kept."""
        if size > self._capacity:
            return
        with self._lock:
            _, replaced_size = self._entries.pop(key, (None, 0))
            self._size += size - replaced_size
            self._entries[key] = (profile, size)
            while self._size > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size -= freed
