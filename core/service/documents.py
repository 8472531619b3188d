"""Stored profiles and graphs, and the lists of what is stored."""

from __future__ import annotations

from ..document import Record
from ..graph import Graph
from ..profile import Profile
from .plans import Status
from .stored import Stored


class StoredProfile(Stored):
    """A profile as stored."""

    profile: Profile


class StoredGraph(Stored):
    """A graph as stored."""

    graph: Graph


class ProfileSummary(Stored):
    """One line of a list of profiles.

    Attributes:
        model: Class name of the model.
        num_layers: How many layers it has.
        estimated: Whether it was estimated rather than measured.
    """

    model: str
    num_layers: int
    estimated: bool


class GraphSummary(Stored):
    """One line of a list of graphs."""

    model: str
    num_layers: int


class PlanSummary(Stored):
    """One line of a list of plans; the last three are `None` for an infeasible one."""

    status: Status
    profile_id: str
    model: str | None = None
    num_stages: int | None = None
    step_time_s: float | None = None


class PlanList(Record):
    """Plans, newest first; ``next_cursor`` asks for those before them, `None` if there are none."""

    plans: tuple[PlanSummary, ...]
    next_cursor: str | None = None


class ProfileList(Record):
    """Profiles, likewise."""

    profiles: tuple[ProfileSummary, ...]
    next_cursor: str | None = None


class GraphList(Record):
    """Graphs, likewise."""

    graphs: tuple[GraphSummary, ...]
    next_cursor: str | None = None
