"""A planning request, checked, with everything that is derived from it once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ...core.cluster.cluster import Cluster
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ..cost.assignment import Assignment
from ..cost.banded_chain import band
from ..cost.chain import ChainCosts, Order, StageTable, chain_costs
from ..cost.device_classes import Devices, group_devices
from ..cost.plan_cost import CostedPlan, CostModel
from ..cost.work_limits import WorkLimits
from ..dag.layer_graph import LayerGraph
from ..dag.order_free_bound import OrderFreeBounds
from ..dag.reorder import reorder_profile
from ..search.arcs import coarse_positions
from .constraints import (
    SearchPart,
    allowed_positions,
    check_asked,
    cuts_in_blocks,
    keeps_constraints,
    limit_to_state,
    search_parts,
)
from .input_checks import check_links, check_magnitude, check_options
from .regular import find_irregularity
from .training_options import resolve_training_options

MAX_ATOMS = 1_100
"""Positions up to which tables of their number squared are searched exhaustively."""

ORDER_ATOMS = 400
"""Positions per order of the layers if only some orders are searched."""

COARSEST_ATOMS = 32
"""Positions of the quickest search."""

MAX_REFINED_ATOMS = 600
"""Positions of a search around the cuts of the best plan known."""


@dataclass(frozen=True)
class Progress:
    """Best plan found so far, by the objective: for ``step_time`` its simulated step.

    The lower bound is 0 while none is known. ``plan`` builds the plan, in milliseconds, for callers
    who keep it in case the search is ended; `None` if only the bound is new.
    """

    elapsed_s: float
    value: float
    lower_bound: float = 0.0
    plan: Callable[[], Plan] | None = None

    def map(self, change: Callable[[Plan], Plan]) -> Progress:
        """Return the progress with its plan changed once it is built."""
        build = self.plan
        return self if build is None else replace(self, plan=lambda: change(build()))


@dataclass(frozen=True, eq=False)
class PlanningRequest:
    """Profile, cluster and options, checked.

    Attributes:
        table_of: Looks up cost tables between given positions; `None` to build them.
        started: Start of planning on the clock of `time.monotonic`.
        deadline: Deadline on the same clock; infinite for none.
        seeks_bound: False where a bound on the steps of all plans is of no use.
        build: Builds the plan document of a plan that ``progress`` is told of.
        state_note: Why the options were limited, if a layer's state did so; else empty.

    Raises:
        InvalidInput: Numbers are out of range, options contradict each other, or a constraint
            names something that does not exist.
        Infeasible: Devices or cuts do not allow that many stages.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    table_of: Callable[[tuple[int, ...]], ChainCosts] | None = None
    started: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    progress: Callable[[Progress], None] | None = None
    build: Callable[[PlanningRequest, CostedPlan], Plan] | None = None
    seeks_bound: bool = True
    state_note: str = field(default="", init=False)

    def __post_init__(self) -> None:
        # Here, where every request passes, also those for remedies and of a batch's sizes.
        options, note = limit_to_state(self.profile, self.options)
        options = resolve_training_options(self.profile, options, self.cluster.devices)
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "state_note", note)
        check_options(self.options)
        check_links(self.cluster, self.options)
        check_magnitude(self.profile, self.devices, self.options)
        nodes = self.branches.nodes.dag.num_nodes if self.branches else None
        check_asked(self.profile, self.positions, self.devices, self.options, nodes)

    @cached_property
    def devices(self) -> Devices:
        return group_devices(self.cluster, self.options)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Return the layers in front of which stages may begin, and the number of layers."""
        return allowed_positions(self.profile, self.options)

    @cached_property
    def costs(self) -> ChainCosts:
        """Return the tables between all positions, or between as many as can be searched."""
        if len(self.positions) - 1 <= MAX_ATOMS:
            return self._tables(self.positions)
        return self.coarse(MAX_ATOMS)

    def _tables(self, positions: tuple[int, ...]) -> ChainCosts:
        return self.table_of(positions) if self.table_of else chain_costs(self.profile, positions)

    @cached_property
    def band(self) -> StageTable | None:
        """Return all stages that may fit a device if there are too many positions for `costs`."""
        if len(self.costs.positions) == len(self.positions):
            return None
        return band(self.profile, self.positions, self.devices, self.options)

    def within(self, limits: WorkLimits) -> StageTable | None:
        """Return the stages of all plans that keep the limits; None if there are too many.

        Of all orders of the layers, where the options allow to reorder them. Stages are left out
        also if they cannot fit any device.
        """
        if self.branches is not None:
            return self.branches.within(limits)
        return band(self.profile, self.positions, self.devices, self.options, limits)

    def around(self, cuts: tuple[int, ...], step: int) -> ChainCosts:
        """Return tables between these cuts, positions some steps from them, and some even ones."""
        index = {layer: number for number, layer in enumerate(self.positions)}
        found = set(coarse_positions(self.profile, self.positions, COARSEST_ATOMS))
        reach = max(1, min(8, MAX_REFINED_ATOMS // (2 * len(cuts))))
        for cut in cuts:
            near = index[cut]
            first = near - min(reach, near // step) * step
            found.update(self.positions[first : near + reach * step + 1 : step])
        return self._tables(tuple(sorted(found)))

    @cached_property
    def branches(self) -> LayerGraph | None:
        """Return the layer graph if the options allow reordering and the model has branches."""
        if self.options.layer_order == "given" or not self.profile.edges:
            return None
        forbidden = cuts_in_blocks(self.profile, self.options)
        found = LayerGraph(self.profile, self.options, forbidden)
        return None if found.is_chain else found

    @cached_property
    def searched(self) -> tuple[StageTable, ...]:
        """Return the tables of stages to search, several if one for all orders is too large."""
        if self.branches is None:
            return (self.costs.stages,) if self.band is None else (self.band,)
        if self.branches.stages is not None:
            return (self.branches.stages,)
        orders = [self._in_order(order) for order in self.branches.orders]
        coarse = self.branches.coarse
        return (self.costs.stages, *orders, *([coarse] if coarse else []))

    def _in_order(self, order: Order) -> StageTable:
        profile = reorder_profile(self.profile, order)
        positions = allowed_positions(profile, self.options)
        positions = coarse_positions(profile, positions, ORDER_ATOMS)
        return replace(chain_costs(profile, positions), order=order).stages

    @cached_property
    def order_free(self) -> OrderFreeBounds | None:
        """Return bounds over all orders if only some are searched, else `None`."""
        if self.branches is None or self.branches.stages is not None:
            return None
        whole_s = self.costs.stages.whole_s
        return OrderFreeBounds.of(self.branches, whole_s, self.devices, self.options)

    @property
    def is_whole(self) -> bool:
        """Return True if `searched` covers every plan."""
        if self.branches is not None:
            return self.order_free is None
        return self.band is not None or len(self.costs.positions) == len(self.positions)

    def coarse(self, count: int) -> ChainCosts:
        """Return tables between at most ``count`` positions."""
        return self._tables(coarse_positions(self.profile, self.positions, count))

    @cached_property
    def cost_model(self) -> CostModel:
        reordered = self.branches.costs.chain_costs if self.branches else None
        return CostModel(self.costs, self.devices, self.options, reordered)

    def reorder_profile(self, order: Order) -> PlanningRequest:
        """Return the request for the profile with its layers in a fixed other order."""
        profile = reorder_profile(self.profile, order)
        return replace(self, profile=profile, table_of=None)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def spent_share(self) -> float:
        """Return the share of the time until the deadline that has passed."""
        if self.is_over:
            return 1.0
        return (time.monotonic() - self.started) / (self.deadline - self.started)

    def allows(self, assignment: Assignment) -> bool:
        """Return True if a plan keeps every constraint of the options; memory is not checked."""
        if assignment.order:
            # Only the search reorders, and it only builds stages that are allowed; variations of
            # its plans may give them other numbers of replicas.
            return not find_irregularity(assignment, self.profile, self.options)
        return keeps_constraints(
            assignment, self.profile, self.positions, self.devices, self.options
        )

    def cost(self, costed: CostedPlan) -> float:
        """Return what plans are compared by: the simulated step, or another objective's value."""
        return costed.step_time_s if self.options.objective == "step_time" else costed.value

    def tell(self, costed: CostedPlan, lower_bound: float = 0.0) -> None:
        """Report a better plan or bound to the caller."""
        if self.progress:
            made = self.build and partial(self.build, self, costed)
            elapsed_s = time.monotonic() - self.started
            self.progress(Progress(elapsed_s, self.cost(costed), lower_bound, made))


def all_parts(
    request: PlanningRequest, devices: Devices, *, with_ties: bool = True
) -> Iterator[SearchPart]:
    """Yield the parts of all tables that are searched, on these devices."""
    # A band holds only the stages that fit the request's own devices, so for devices with more
    # memory the tables between fewer positions take its place.
    searched = request.searched
    if request.band is not None and devices.is_roomier(request.devices):
        searched = (request.costs.stages,)
    for table in searched:
        yield from search_parts(table, devices, request.options, with_ties=with_ties)
