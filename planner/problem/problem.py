"""One planning request, with everything derived from it once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...core.cluster.cluster import Cluster
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ..cost.assignment import Assignment
from ..cost.banded_chain import band
from ..cost.chain import Tables, tables
from ..cost.device_classes import Devices, devices_of
from ..cost.plan_cost import Pricer
from ..cost.stage_table import Order, StageTable
from ..dag.layer_graph import Branches
from ..dag.order_free_bound import OrderFree
from ..dag.reorder import in_order
from ..search.arcs import coarse_positions
from .constraints import Part, allowed_positions, check_asked, keeps_constraints, parts
from .numeric_limits import check_magnitude
from .option_rules import check_options

MAX_ATOMS = 1_100
"""Beyond this many positions the tables (their number squared) get too large to search whole."""

ORDER_ATOMS = 400
"""Positions in one of several orders, where not all orders are searched."""

COARSEST_ATOMS = 32
"""Positions of the quickest search."""

MAX_REFINED_ATOMS = 600
"""Positions of a search around the cuts of the best plan known."""


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
        InvalidInput: Numbers are out of range, an option does not go with the others, or a
            constraint names nothing.
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
        check_options(self.options)
        check_magnitude(self.profile, self.devices, self.options)
        nodes = self.branches.nodes.dag.num_nodes if self.branches else None
        check_asked(self.profile, self.positions, self.devices, self.options, nodes)

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

    @cached_property
    def band(self) -> StageTable | None:
        """All stages that could fit a device, where there are too many positions for `costs`."""
        if len(self.costs.positions) == len(self.positions):
            return None
        return band(self.profile, self.positions, self.devices, self.options)

    def around(self, cuts: tuple[int, ...]) -> Tables:
        """Tables between these cuts, the positions next to them, and some even ones."""
        index = {layer: number for number, layer in enumerate(self.positions)}
        found = set(coarse_positions(self.profile, self.positions, COARSEST_ATOMS))
        reach = max(1, min(8, MAX_REFINED_ATOMS // (2 * len(cuts))))
        for cut in cuts:
            near = index[cut]
            found.update(self.positions[max(near - reach, 0) : near + reach + 1])
        return self.table_of(tuple(sorted(found)))

    @cached_property
    def branches(self) -> Branches | None:
        """The graph of layers, where they may and can be reordered."""
        if self.options.layer_order == "given" or not self.profile.edges:
            return None
        found = Branches(self.profile, self.options)
        return None if found.is_chain else found

    @cached_property
    def searched(self) -> tuple[StageTable, ...]:
        """The stages plans are made of: one table, or several where one would be too large."""
        if self.branches is None:
            return (self.costs.stages,) if self.band is None else (self.band,)
        if self.branches.stages is not None:
            return (self.branches.stages,)
        orders = [self._in_order(order) for order in self.branches.orders]
        coarse = self.branches.coarse
        return (self.costs.stages, *orders, *([coarse] if coarse else []))

    def _in_order(self, order: Order) -> StageTable:
        """The chain of an order."""
        profile = in_order(self.profile, order)
        positions = allowed_positions(profile, self.options)
        positions = coarse_positions(profile, positions, ORDER_ATOMS)
        return replace(tables(profile, positions), order=order).stages

    @cached_property
    def order_free(self) -> OrderFree | None:
        """Bounds for when not every order can be searched; `None` where it is."""
        if self.branches is None or self.branches.stages is not None:
            return None
        whole_s = self.costs.stages.whole_s
        return OrderFree.of(self.branches, whole_s, self.devices, self.options)

    @property
    def is_whole(self) -> bool:
        """Whether `searched` has every plan there is."""
        if self.branches is not None:
            return self.order_free is None
        return self.band is not None or len(self.costs.positions) == len(self.positions)

    def coarse(self, count: int) -> Tables:
        """Tables between at most so many positions."""
        return self.table_of(coarse_positions(self.profile, self.positions, count))

    @cached_property
    def pricer(self) -> Pricer:
        reordered = self.branches.costs.tables if self.branches else None
        return Pricer(self.costs, self.devices, self.options, reordered)

    def in_order(self, order: Order) -> Request:
        """The same for the profile with its layers in another order, which is then kept."""
        profile = in_order(self.profile, order)
        return replace(self, profile=profile, table_of=lambda cuts: tables(profile, cuts))

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def allows(self, assignment: Assignment) -> bool:
        """Whether a plan keeps every constraint of the options; memory is not looked at.

        Plans in another order are only ever made of what their order allows.
        """
        return bool(assignment.order) or keeps_constraints(
            assignment, self.profile, self.positions, self.devices, self.options
        )

    def tell(self, value: float, lower_bound: float = 0.0) -> None:
        """Report a better plan."""
        if self.progress:
            self.progress(Progress(time.monotonic() - self.started, value, lower_bound))


def all_parts(request: Request, devices: Devices, *, with_ties: bool = True) -> Iterator[Part]:
    """All plans that are searched, on these devices, in parts.

    A band has only the stages that fit the request's own devices; for roomier ones the tables of
    some positions stand in.
    """
    searched = request.searched
    if request.band is not None and devices.is_roomier(request.devices):
        searched = (request.costs.stages,)
    for table in searched:
        yield from parts(table, devices, request.options, with_ties=with_ties)
