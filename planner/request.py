"""One planning request, with everything derived from it once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ..core.cluster import Cluster
from ..core.plan import PlanOptions
from ..core.profile import Profile
from .assignment import Assignment
from .classes import Devices, devices_of
from .constraints import allowed_positions, check_counts, keeps_constraints
from .cost import Tables
from .magnitude import check_magnitude
from .moves import coarse_positions
from .price import Pricer
from .stage_table import StageTable

MAX_ATOMS = 1_100
"""Beyond this many positions the tables (their number squared) get too large to search whole."""

ROUGH_ATOMS = 12_000
"""Beyond this many even summing up intervals is done on groups of layers only."""


@dataclass(frozen=True)
class Progress:
    """A better plan was found.

    Attributes:
        elapsed_s: Since planning began.
        value: By the objective.
        lower_bound: Known so far; 0 if nothing is.
    """

    elapsed_s: float
    value: float
    lower_bound: float = 0.0


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for, checked.

    Attributes:
        table_of: Makes or remembers the cost tables between some positions.
        started: On the clock of `time.monotonic`.
        deadline: On the same clock; infinite for none.

    Raises:
        InvalidInput: Numbers are out of range, or a constraint names nothing.
        Infeasible: More stages are asked for than there are devices or cuts.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    table_of: Callable[[tuple[int, ...]], Tables]
    started: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        check_magnitude(self.profile, self.cluster, self.options)
        check_counts(len(self.positions) - 1, self.devices, self.options)

    @cached_property
    def devices(self) -> Devices:
        return devices_of(self.cluster, self.options)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Layers in front of which stages may begin, and the number of layers."""
        return allowed_positions(self.profile, self.options)

    @cached_property
    def costs(self) -> Tables:
        """Tables between all positions, or as many of them as can be searched."""
        if len(self.positions) - 1 <= MAX_ATOMS:
            return self.table_of(self.positions)
        return self.coarse(MAX_ATOMS)

    @property
    def stages(self) -> StageTable:
        """The stages a plan is made of."""
        return self.costs.stages

    @property
    def is_whole(self) -> bool:
        """Whether `costs` has all positions."""
        return len(self.costs.positions) == len(self.positions)

    def coarse(self, count: int) -> Tables:
        """Tables between at most so many positions."""
        return self.table_of(coarse_positions(self.profile, self.positions, count))

    @cached_property
    def pricer(self) -> Pricer:
        return Pricer(self.costs, self.devices, self.options)

    def allows(self, assignment: Assignment) -> bool:
        """Whether a plan keeps every constraint of the options; memory is not looked at."""
        return keeps_constraints(
            assignment, self.profile, self.positions, self.devices, self.options
        )

    def tell(self, value: float, lower_bound: float = 0.0) -> None:
        """Report a better plan."""
        if self.progress:
            self.progress(Progress(time.monotonic() - self.started, value, lower_bound))
