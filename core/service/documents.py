"""Stored profiles and graphs, and lists of stored documents."""

from __future__ import annotations

from ..document import Record
from ..graph.graph import Graph
from ..profile.profile import Profile
from .plans import Status
from .stored import Stored


class StoredProfile(Stored):
    """A stored profile."""

    profile: Profile


class StoredGraph(Stored):
    """A stored graph."""

    graph: Graph


class ProfileSummary(Stored):
    """An entry in a list of profiles.

    Attributes:
        model: Class name of the model.
        estimated: Whether the profile was estimated rather than measured.
        family: Model family, if the model was built from one.
        num_parameters: Tied weights count once; `None` if the profile does not list them.
    """

    model: str
    num_layers: int
    estimated: bool
    family: str | None = None
    num_parameters: int | None = None


class GraphSummary(Stored):
    """An entry in a list of graphs."""

    model: str
    num_layers: int


class PlanSummary(Stored):
    """An entry in a list of plans.

    Attributes:
        profile_id: The profile planned from; `model`, `family`, `num_layers` and
            `num_parameters` describe it, as in a `ProfileSummary`.
        devices: Requested devices of each kind, e.g. ``8 x H100``.
        schedule: The plan's schedule, or the requested one if infeasible.
        num_stages: `None` if infeasible.
        step_time_s: `None` if infeasible.
    """

    status: Status
    profile_id: str
    model: str | None = None
    family: str | None = None
    num_layers: int | None = None
    num_parameters: int | None = None
    devices: str | None = None
    schedule: str | None = None
    num_stages: int | None = None
    step_time_s: float | None = None


class PlanList(Record):
    """Plans, newest first; ``next_cursor`` requests the next page, `None` on the last one."""

    plans: tuple[PlanSummary, ...]
    next_cursor: str | None = None


class ProfileList(Record):
    """Profiles, newest first; ``next_cursor`` as in `PlanList`."""

    profiles: tuple[ProfileSummary, ...]
    next_cursor: str | None = None


class GraphList(Record):
    """Graphs, newest first; ``next_cursor`` as in `PlanList`."""

    graphs: tuple[GraphSummary, ...]
    next_cursor: str | None = None
