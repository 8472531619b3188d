"""Profiles, graphs and plan records in tables; see `contract.Documents`."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, Table, and_, or_, select

from ...core.cluster.table import format_devices
from ...core.document import Record
from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import (
    GraphSummary,
    PlanSummary,
    ProfileSummary,
    StoredGraph,
    StoredProfile,
)
from ...core.service.plans import PlanRecord, StoredPlan
from .database import Database
from .errors import NotFound
from .idempotency import remember
from .lru_cache import Lately
from .pagination import page
from .records import Page, Stored
from .tables import GRAPHS, PLANS, PROFILES

Summary = TypeVar("Summary", bound=Record)

PARSED_CHARACTERS = 16 * 2**20
"""Of the profiles planned from last, which are kept as read; they take several times as much."""

MAX_NUMBER = 2**63 - 1
"""That a column holds."""


class SqlDocuments:
    """`contract.Documents` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._parsed: Lately[Profile] = Lately(PARSED_CHARACTERS)

    def put_profile(self, project_id: str, profile: Profile) -> Stored:
        with self._database.write() as connection:
            row = self.insert_profile(connection, project_id, profile)
        return Stored(id=row.id, created_at=row.created_at)

    def put_graph(self, project_id: str, graph: Graph) -> Stored:
        with self._database.write() as connection:
            row = self.insert_graph(connection, project_id, graph)
        return Stored(id=row.id, created_at=row.created_at)

    def put_plan(
        self, project_id: str, record: PlanRecord, *, request_digest: str | None = None
    ) -> StoredPlan:
        with self._database.write() as connection:
            row = self.insert_plan(connection, project_id, record)
            if request_digest is not None:
                remember(connection, self._database, project_id, "plan", request_digest, row.id)
        return StoredPlan(id=row.id, created_at=row.created_at, **dict(record))

    def profile(self, project_id: str, profile_id: str) -> StoredProfile:
        with self._database.read() as connection:
            row = connection.execute(_dated(PROFILES, project_id, profile_id)).first()
            if row is None:
                raise NotFound("profile", profile_id)
            profile = self._parsed.get(profile_id)
            if profile is None:
                text = connection.execute(_document(PROFILES, project_id, profile_id)).scalar_one()
                profile = Profile.model_validate_json(text)
                self._parsed.put(profile_id, profile, len(text))
        # Checked when it was read; checking it again takes longer than all the rest.
        return StoredProfile.model_construct(id=row.id, created_at=row.created_at, profile=profile)

    def profile_json(self, project_id: str, profile_id: str) -> str:
        row = self._row(PROFILES, "profile", project_id, profile_id)
        return _as_stored(row, f'"profile":{row.document}}}')

    def graph_json(self, project_id: str, graph_id: str) -> str:
        row = self._row(GRAPHS, "graph", project_id, graph_id)
        return _as_stored(row, f'"graph":{row.document}}}')

    def plan_json(self, project_id: str, plan_id: str) -> str:
        row = self._row(PLANS, "plan", project_id, plan_id)
        return _as_stored(row, row.document[1:])

    def graph(self, project_id: str, graph_id: str) -> StoredGraph:
        row = self._row(GRAPHS, "graph", project_id, graph_id)
        graph = Graph.model_validate_json(row.document)
        return StoredGraph(id=row.id, created_at=row.created_at, graph=graph)

    def plan(self, project_id: str, plan_id: str) -> StoredPlan:
        return _stored_plan(self._row(PLANS, "plan", project_id, plan_id))

    def profile_summary(self, project_id: str, profile_id: str) -> ProfileSummary:
        columns = select(*(PROFILES.c[name] for name in ProfileSummary.model_fields))
        wanted = columns.where(PROFILES.c.project_id == project_id, PROFILES.c.id == profile_id)
        with self._database.read() as connection:
            row = connection.execute(wanted).first()
        if row is None:
            raise NotFound("profile", profile_id)
        return ProfileSummary.model_validate(dict(row._mapping))

    def profiles(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[ProfileSummary]:
        return self._list(PROFILES, ProfileSummary, project_id, limit, cursor)

    def graphs(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[GraphSummary]:
        return self._list(GRAPHS, GraphSummary, project_id, limit, cursor)

    def plan_summary(self, project_id: str, plan_id: str) -> PlanSummary:
        wanted = plan_summaries(project_id, "").where(PLANS.c.id == plan_id)
        with self._database.read() as connection:
            row = connection.execute(wanted).first()
        if row is None:
            raise NotFound("plan", plan_id)
        return as_summary(row)

    def plans(
        self, project_id: str, *, limit: int, cursor: str | None = None, search: str = ""
    ) -> Page[PlanSummary]:
        rows = plan_summaries(project_id, search)
        with self._database.read() as connection:
            return page(connection, rows, PLANS, as_summary, limit=limit, cursor=cursor)

    def insert_profile(self, connection: Connection, project_id: str, profile: Profile) -> Row[Any]:
        """As `put_profile`, in a transaction of the caller's."""
        identifier, text = profile.content_id(), profile.to_json()
        self._parsed.put(identifier, profile, len(text))  # it is planned from next, or looked at
        values = {
            "id": identifier,
            "model": profile.model,
            "num_layers": len(profile.layers),
            "estimated": profile.provenance.source == "estimated",
            "family": profile.spec.family if profile.spec else None,
            "num_parameters": num_parameters(profile),
            "document": text,
        }
        return self._put(connection, PROFILES, project_id, values)

    def insert_graph(self, connection: Connection, project_id: str, graph: Graph) -> Row[Any]:
        """As `put_graph`, in a transaction of the caller's."""
        values = {
            "id": graph.content_id(),
            "model": graph.model,
            "num_layers": len(graph.layers),
            "document": graph.to_json(),
        }
        return self._put(connection, GRAPHS, project_id, values)

    def insert_plan(self, connection: Connection, project_id: str, record: PlanRecord) -> Row[Any]:
        """As `put_plan`, in a transaction of the caller's."""
        known = select(PROFILES.c.id).where(
            PROFILES.c.project_id == project_id, PROFILES.c.id == record.profile_id
        )
        # Shared, so that retention cannot take the profile before the plan is there.
        if connection.execute(known.with_for_update(read=True)).first() is None:
            raise NotFound("profile", record.profile_id)
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
        return self._put(connection, PLANS, project_id, values)

    def _put(
        self, connection: Connection, table: Table, project_id: str, values: dict[str, Any]
    ) -> Row[Any]:
        """Insert unless the project has the id; either way, id and time of the row now stored."""
        statement = self._database.insert(table).values(
            project_id=project_id, created_at=self._database.now(), **values
        )
        connection.execute(statement.on_conflict_do_nothing(index_elements=["project_id", "id"]))
        return connection.execute(_dated(table, project_id, values["id"])).one()

    def _row(self, table: Table, kind: str, project_id: str, identifier: str) -> Row[Any]:
        with self._database.read() as connection:
            row = connection.execute(_one(table, project_id, identifier)).first()
        if row is None:
            raise NotFound(kind, identifier)
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
        columns = [table.c[name] for name in names]
        rows = select(table.c.position, *columns).where(table.c.project_id == project_id)

        def as_item(row: Row[Any]) -> Summary:
            return summary.model_validate({name: row._mapping[name] for name in names})

        with self._database.read() as connection:
            return page(connection, rows, table, as_item, limit=limit, cursor=cursor)


def num_parameters(profile: Profile) -> int | None:
    """Of the model, tied ones once; `None` where they are not listed, or nobody has so many."""
    listed = sum(one.numel for one in profile.parameters if one.kind == "parameter")
    return listed if 0 < listed <= MAX_NUMBER else None


def _one(table: Table, project_id: str, identifier: str) -> Any:
    return select(table).where(table.c.project_id == project_id, table.c.id == identifier)


def _dated(table: Table, project_id: str, identifier: str) -> Any:
    columns = select(table.c.id, table.c.created_at)
    return columns.where(table.c.project_id == project_id, table.c.id == identifier)


def _document(table: Table, project_id: str, identifier: str) -> Any:
    column = select(table.c.document)
    return column.where(table.c.project_id == project_id, table.c.id == identifier)


def _as_stored(row: Row[Any], rest: str) -> str:
    """The JSON of a `Stored` row whose further fields are those of a text, up to its brace."""
    stored = Stored(id=row.id, created_at=row.created_at).model_dump_json()
    return f"{stored[:-1]},{rest}"


def _stored_plan(row: Row[Any]) -> StoredPlan:
    record = PlanRecord.model_validate_json(row.document)
    return StoredPlan(id=row.id, created_at=row.created_at, **dict(record))


OF_PROFILE = frozenset({"model", "family", "num_layers", "num_parameters"})
COLUMNS = {
    name: (PROFILES if name in OF_PROFILE else PLANS).c[name] for name in PlanSummary.model_fields
}
SEARCHED = ("id", "model", "family", "devices", "schedule", "status")

MAX_WORDS = 8
"""Searched for; each is looked for in every column."""


def plan_summaries(project_id: str, search: str) -> Select[Any]:
    """A project's plans, in no order; those alone that have every word of a search."""
    profile_of_plan = and_(
        PLANS.c.project_id == PROFILES.c.project_id, PLANS.c.profile_id == PROFILES.c.id
    )
    rows = (
        select(PLANS.c.position, *COLUMNS.values())
        .join_from(PLANS, PROFILES, profile_of_plan)
        .where(PLANS.c.project_id == project_id)
    )
    for word in search.replace("\0", " ").split()[:MAX_WORDS]:
        found = (COLUMNS[name].icontains(word, autoescape=True) for name in SEARCHED)
        rows = rows.where(or_(*found))
    return rows


def as_summary(row: Row[Any]) -> PlanSummary:
    """A row of `plan_summaries`."""
    values = row[1:]  # the first is its position
    return PlanSummary.model_validate(dict(zip(COLUMNS, values, strict=True)))
