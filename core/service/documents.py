"""Stored profiles and graphs, and the lists of what is stored."""

from __future__ import annotations

from ..document import Record
from ..graph.graph import Graph
from ..profile.profile import Profile
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
        family: The family of models it was built from; `None` if it was not.
        num_parameters: Of the model, tied ones once; `None` where the profile does not list them.
    """

    model: str
    num_layers: int
    estimated: bool
    family: str | None = None
    num_parameters: int | None = None


class GraphSummary(Stored):
    """One line of a list of graphs."""

    model: str
    num_layers: int


class PlanSummary(Stored):
    """One line of a list of plans.

    Attributes:
        status: Whether there is a plan.
        profile_id: The profile planned from; `model`, `family`, `num_layers` and
            `num_parameters` are of it, as in a `ProfileSummary`.
        devices: How many of each kind were asked for, e.g. ``8 x H100``.
        schedule: The plan's, or the one asked for where nothing fits.
        num_stages: `None` where nothing fits.
        step_time_s: Likewise.
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
