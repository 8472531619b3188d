"""The cost model: stage costs, objective and simulated step of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise

import numpy as np

from ...core.cluster.cluster import LinkLevel
from ...core.errors import InvalidInput
from ...core.models.training_memory import training_bytes
from ...core.plan.plan import DirectSend, MemoryUse, PlanOptions
from ...core.plan.schedule import POSTED_AHEAD, ScheduleName
from ...core.profile.backward_parts import has_parts, stage_parts_s
from ...schedules.action_order import default_depths, make_order
from ...schedules.activation_memory import most_in_flight
from ...schedules.layout import copies, make_layout
from ...schedules.traits import CLOSED_FORM, FOLDED, SPLIT_BACKWARD
from ..simulator.durations import skip_times
from ..simulator.simulate import StageTimes, step_time
from .assignment import Assignment
from .chain import Bytes, ChainCosts, Order, chain_costs
from .communication import (
    NOTHING,
    Sent,
    SkipConnection,
    StageLinks,
    bytes_over_cut,
    bytes_past_stage,
    find_skip_values,
    find_skips,
)
from .device_classes import Devices
from .sharing import (
    SharedBytes,
    check_gathering,
    choose_sharing,
    held_share,
    list_shared,
    saves_memory,
    sent_each_round,
)


@dataclass(frozen=True)
class StageCost:
    """The costs of one stage; times in seconds per micro-batch on one replica.

    The backward has the recomputed forward in it. ``backward_input_s`` is its part for gradients of
    inputs where that is known apart. ``outgoing_s`` is both ways over the cut behind the stage.
    Gradients are summed once a step, and ``exposed_sync_s`` is what of that outlasts the backward
    of the layers in front. ``size_bytes`` counts weights and the activations of one micro-batch.
    ``is_shared`` says that replicas hold parts of the optimizer's state (`sharing`).
    """

    forward_s: float
    backward_s: float
    send_forward_s: float
    send_backward_s: float
    outgoing_s: float
    sync_s: float
    exposed_sync_s: float
    microbatches: int
    in_flight: int
    memory: MemoryUse
    limit_bytes: int | None
    send_forward_bytes: int
    send_backward_bytes: int
    size_bytes: int
    is_shared: bool = False
    backward_input_s: float | None = None

    @property
    def input_s(self) -> float:
        """Return the part of the backward for gradients of inputs, half where it is not known."""
        return self.backward_s / 2 if self.backward_input_s is None else self.backward_input_s

    @property
    def whole_s(self) -> float:
        """Return tau: the stage's work plus the transfers over its outgoing cut."""
        return self.forward_s + self.backward_s + self.outgoing_s

    @cached_property
    def held_bytes(self) -> int:
        """Return the sum of `memory`."""
        return self.memory.total_bytes


@dataclass(frozen=True)
class CostedPlan:
    """A plan with its costs.

    ``value`` is by the objective asked for, ``model_s`` the closed form of the step,
    ``step_time_s`` its simulation. ``direct_sends`` are empty where everything is relayed;
    ``other_step_s`` is the step the other way round, `None` where that is not allowed or no
    different.
    """

    assignment: Assignment
    stages: tuple[StageCost, ...]
    tied_sync_s: float
    value: float
    model_s: float
    step_time_s: float
    bubble_fraction: float
    forward_channels: tuple[int, ...] = ()
    backward_channels: tuple[int, ...] = ()
    direct_sends: tuple[DirectSend, ...] = ()
    other_step_s: float | None = None


@dataclass(frozen=True)
class Decision:
    """The chosen plan and the bounds proven for all others.

    Attributes:
        lower_bound: Lower bound on the objective of every plan.
        simulated_bound_s: Lower bound on the simulated step of every plan.
        closed_value: Least value that the search by the step's closed form found.
        closed_bound: Lower bound on that value of every plan.
        is_whole: Whether all plans were searched, even where the request's tables hold only some.
        notes: What the plan has to say of how it was chosen.
    """

    costed: CostedPlan
    lower_bound: float
    simulated_bound_s: float
    closed_value: float = 0.0
    closed_bound: float = 0.0
    is_whole: bool = False
    notes: tuple[str, ...] = ()

    @property
    def search_gap(self) -> float:
        """Return the relative gap at which the search ended."""
        pairs = (self.closed_value, self.closed_bound), (self.costed.value, self.lower_bound)
        value, bound = pairs[not self.closed_value]
        return 1 - bound / value if value else 0.0


class CostModel:
    """The cost model of plans for one profile, cluster and set of options.

    Plans cut elsewhere than at the tables' positions are looked up apart; ``reordered`` builds
    tables between the cuts of another order of the layers.
    """

    def __init__(
        self,
        costs: ChainCosts,
        devices: Devices,
        options: PlanOptions,
        reordered: Callable[[Order, tuple[int, ...]], ChainCosts] | None = None,
    ) -> None:
        self.costs, self.devices, self.options = costs, devices, options
        self.only_forward = options.objective == "latency"
        self.schedule: ScheduleName = "forward_only" if self.only_forward else options.schedule
        self.num_microbatches = 1 if self.only_forward else options.num_microbatches
        self.training = training_bytes(options.precision, options.optimizer)
        self._has_parts = self.schedule in SPLIT_BACKWARD and has_parts(costs.profile)
        self._may_share = choose_sharing(options) != "replicate" and not self.only_forward
        self.memory_tables = StageMemoryTables(costs, options, self.num_microbatches)
        self._reordered = reordered
        self.links = StageLinks(devices, only_forward=self.only_forward)
        self._values = find_skip_values(costs.profile) if options.skips == "direct" else ()
        self._apart = lru_cache(maxsize=64)(self._tables)
        self._counted = lru_cache(maxsize=256)(self._counted_depths)
        # Most plans that are compared differ in one or two stages, and each is looked at thrice.
        self._stage = lru_cache(maxsize=8192)(self._compute_stage)
        self.stages = lru_cache(maxsize=16)(self._compute_stages)
        self.evaluate = lru_cache(maxsize=16)(
            self._evaluate
        )  # a plan and its baselines, twice each

    def _tables(self, order: Order, cuts: tuple[int, ...]) -> ChainCosts:
        if order:
            assert self._reordered is not None
            return self._reordered(order, cuts)
        return chain_costs(self.costs.profile, cuts)

    def _costs(self, assignment: Assignment) -> ChainCosts:
        """Return tables whose positions include the plan's cuts."""
        if not assignment.order and self.costs.has(assignment.cuts):
            return self.costs
        return self._apart(assignment.order, assignment.cuts)

    def depths(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the micro-batches in flight at one replica of each stage."""
        m, replicas = self.num_microbatches, assignment.replicas
        if self.only_forward:
            return (1,) * len(replicas)
        if self.schedule == "gpipe":
            return tuple(-(-m // count) for count in replicas)
        if self.schedule == "1f1b":
            return default_depths(m, replicas, assignment.extra_depths)
        return self._counted(replicas, assignment.chunks)

    def _counted_depths(self, replicas: tuple[int, ...], chunks: int) -> tuple[int, ...]:
        """Count the micro-batches in flight in the schedule; replicas are separate pipelines."""
        make_layout(self.schedule, self.num_microbatches, replicas, chunks)
        check_gathering(self.options, replicas[0], len(replicas) // chunks)
        alone = (1,) * len(replicas)
        counted = [
            most_in_flight(make_order(self.schedule, dealt, alone, chunks=chunks))
            for dealt in copies(self.num_microbatches, replicas[0])
        ]
        return tuple(map(max, zip(*counted, strict=True)))

    def skips(self, assignment: Assignment) -> tuple[SkipConnection, ...]:
        """Return the skip connections that may bypass stages; none if layers are reordered."""
        if assignment.order or not self._values:
            return ()
        return find_skips(self._values, assignment.cuts)

    @property
    def knows_readers(self) -> bool:
        """Return True if the profile says which layers read each value."""
        return self._values is not None

    def _compute_stages(
        self, assignment: Assignment, skips: tuple[SkipConnection, ...] = ()
    ) -> tuple[StageCost, ...]:
        """Compute every stage's costs; a stage neither relays nor holds what bypasses it."""
        cuts = assignment.cuts
        costs = self._costs(assignment)
        spans = [(costs.index[first], costs.index[last]) for first, last in pairwise(cuts)]
        depths = self.depths(assignment)
        links = []
        for stage in range(len(spans) - 1):
            position = spans[stage][1]
            past = bytes_over_cut(skips, stage) if skips else (0, 0)
            forward_bytes = int(costs.arriving_bytes[position]) - past[0]
            backward_bytes = int(costs.returning_bytes[position]) - past[1]
            links.append(
                self.links.sent(assignment, stage, stage + 1, forward_bytes, backward_bytes)
            )
        found = []
        for stage, span in enumerate(spans):
            number, count = assignment.classes[stage], assignment.replicas[stage]
            level, end = 0, assignment.ends[stage]
            if count > 1:
                level = self.devices.classes[number].level_of(end - count, end - 1)
            before = links[stage - 1] if stage else NOTHING
            after = links[stage] if stage + 1 < len(spans) else NOTHING
            past = bytes_past_stage(skips, stage) if skips else (0, 0)
            again = assignment.recompute[stage]
            rings: tuple[tuple[LinkLevel, ...], ...] = ()
            if count > 1 and self.devices.pair_links:
                rings = self.devices.list_rings(assignment.device_indices(self.devices, stage))
            found.append(
                self._stage(
                    costs, span, number, count, level, again, depths[stage], before, after, past,
                    rings,
                )
            )  # fmt: skip
        return tuple(found)

    def _compute_stage(
        self,
        costs: ChainCosts,
        span: tuple[int, int],
        number: int,
        count: int,
        level: int,
        again: bool,
        depth: int,
        before: Sent,
        after: Sent,
        past: tuple[int, int],
        rings: tuple[tuple[LinkLevel, ...], ...],
    ) -> StageCost:
        """Compute the costs of a stage of ``count`` devices of a class, joined by a link level."""
        entry = self.devices.classes[number]
        forward_s = float(costs.forward_s[span]) / entry.speed
        backward, inputs_s = float(costs.backward_s[span]), None
        if again:
            backward = backward + float(costs.recompute_s[span])
        if self._has_parts:
            begin, end = costs.positions[span[0]], costs.positions[span[1]]
            layers = costs.order[begin:end] or range(begin, end)
            parts_s = stage_parts_s(self.costs.profile, layers, recompute=again)
            backward, inputs_s = sum(parts_s), parts_s[0] / entry.speed
        backward_s = backward / entry.speed
        sync_s = exposed_s = 0.0
        share = -(-self.num_microbatches // count)
        if count > 1:
            size = self._gradients_bytes(costs, span)
            if self._is_shared(costs, span, count):
                shared = self._shared(costs, span)
                size += share * sent_each_round(self.options, shared, again) - shared.gradients
            sync_s = self.devices.cluster.all_reduce_time_s(
                size,
                count,
                level,
                entry.group_sizes,
                rings,
            )
            # Gradients are summed while the layers in front still run backward, at best on the
            # fastest devices: only what outlasts that delays the step.
            lead_s = float(costs.backward_s[0, span[0]]) if span[0] else 0.0
            exposed_s = max(0.0, sync_s - lead_s / self.devices.fastest)
        return StageCost(
            forward_s=forward_s,
            backward_s=backward_s,
            backward_input_s=inputs_s,
            send_forward_s=after[2],
            send_backward_s=before[3],
            outgoing_s=after[2] + after[3],
            sync_s=sync_s,
            exposed_sync_s=exposed_s,
            microbatches=share,
            in_flight=depth,
            memory=self._memory(costs, span, again, depth, count, past),
            is_shared=self._is_shared(costs, span, count),
            limit_bytes=entry.limit_bytes,
            send_forward_bytes=after[0],
            send_backward_bytes=0 if self.only_forward else before[1],
            size_bytes=int(costs.weights_bytes[span]) + int(costs.saved_bytes[span]),
        )

    def _gradients_bytes(self, costs: ChainCosts, span: tuple[int, int]) -> int:
        more = self.training.gradients * int(costs.learned_elements[span])
        return int(costs.gradients_bytes[span]) + more

    def memory(self, span: tuple[int, int], again: bool, depth: int, replicas: int) -> MemoryUse:
        """Return the memory of one replica of a stage between two positions of the tables."""
        return self._memory(self.costs, span, again, depth, replicas)

    def _memory(
        self,
        costs: ChainCosts,
        span: tuple[int, int],
        again: bool,
        depth: int,
        replicas: int,
        past: tuple[int, int] = (0, 0),
    ) -> MemoryUse:
        """Return the memory of one replica, less the ``past`` bytes that bypass it."""
        first, last = span
        workspace = int(costs.workspace_bytes[span])
        arriving = int(costs.arriving_bytes[first]) - past[0]
        if self.only_forward:
            return MemoryUse(
                weights_bytes=int(costs.weights_bytes[span]),
                workspace_bytes=workspace,
                receive_buffers_bytes=arriving,
            )
        saved = int(costs.saved_bytes[span])
        learned = int(costs.learned_elements[span])
        returning = int(costs.returning_bytes[last]) - past[1]
        inputs = int(costs.input_bytes[first]) - past[0]
        share = -(-self.num_microbatches // replicas)
        weights, gradients = int(costs.weights_bytes[span]), self._gradients_bytes(costs, span)
        copies, state = self.training.copies * learned, self.training.of_state(learned)
        if self._is_shared(costs, span, replicas):
            held = self._shared(costs, span)
            elements = costs.shareable_elements[span]
            if not held.weights:  # by zero1 the largest weight is not divided
                elements = elements - costs.largest_elements[span]
            # Rounded up once for everything: what is in front of it, too, comes off the state.
            before, end = 0, 0
            parts = []
            for size in (held.weights, held.gradients, self.training.master_copies * int(elements)):
                end += size
                parts.append(-(-end // replicas) - before - size)
                before = -(-end // replicas)
            weights, gradients, copies = weights + parts[0], gradients + parts[1], copies + parts[2]
            state -= held.divided - end - (-(-held.divided // replicas) - before)
            workspace += held.whole
        return MemoryUse(
            weights_bytes=weights,
            gradients_bytes=gradients,
            weight_copies_bytes=copies,
            optimizer_bytes=state,
            activations_bytes=(inputs if again else saved) * depth,
            workspace_bytes=workspace + (saved if again else 0),
            receive_buffers_bytes=min(share, POSTED_AHEAD) * (arriving + returning),
        )

    def _shared(self, costs: ChainCosts, span: tuple[int, int]) -> SharedBytes:
        return SharedBytes(*map(int, list_shared(self.options, costs, span)))

    def _is_shared(self, costs: ChainCosts, span: tuple[int, int], replicas: int) -> bool:
        return self._may_share and bool(saves_memory(self._shared(costs, span), replicas))

    def tied_sync_s(self, assignment: Assignment) -> float:
        """Return the time to sum the gradients of weights shared between stages.

        Each is a ring over its owners, over the slowest level between any two of them.
        """
        if self.only_forward or not self.devices.cluster.levels:  # a single device owns all
            return 0.0
        total_s = 0.0
        spans = list(pairwise(assignment.cuts))
        tied = self._costs(assignment).tied if assignment.order else self.costs.tied
        for parameter in tied:
            owners = [
                stage
                for stage, (first, last) in enumerate(spans)
                if any(first <= layer < last for layer in parameter.layers)
            ]
            if len(owners) > 1:
                size = parameter.size_bytes + self.training.gradients * parameter.numel
                total_s += max(
                    link.all_reduce_time_s(size, len(owners))
                    for link in self._slowest_links(assignment, owners)
                )
        return total_s

    def _slowest_links(self, assignment: Assignment, owners: list[int]) -> list[LinkLevel]:
        """Return the outermost level between stages, and the links of pairs of their devices."""
        level = self._slowest(assignment, owners)
        found = [self.devices.levels[level]]
        if self.devices.pair_links:
            of_stage = [assignment.device_indices(self.devices, stage) for stage in owners]
            found += {
                self.devices.link_of(level, one, other)
                for first, second in combinations(of_stage, 2)
                for one in first
                for other in second
            }
        return found

    def _slowest(self, assignment: Assignment, owners: list[int]) -> int:
        """Return the outermost link level between devices of any two of these stages."""
        level = 0
        for place, one in enumerate(owners):
            for other in owners[place + 1 :]:
                first, second = assignment.classes[one], assignment.classes[other]
                if first != second:
                    level = max(level, self.devices.level_between(first, second))
                    continue
                starts = [assignment.ends[s] - assignment.replicas[s] for s in (one, other)]
                ends = [assignment.ends[s] - 1 for s in (one, other)]
                entry = self.devices.classes[first]
                level = max(level, entry.level_of(min(starts), max(ends)))
        return level

    def fits(self, stages: tuple[StageCost, ...], assignment: Assignment) -> bool:
        """Return True if every device has memory for all its stages."""
        return all(
            stage.limit_bytes is None or held <= stage.limit_bytes
            for stage, held in zip(stages, self.held_bytes(stages, assignment), strict=True)
        )

    def held_bytes(self, stages: tuple[StageCost, ...], assignment: Assignment) -> list[int]:
        """Return, per stage, the bytes its device needs for all the stages it holds."""
        if assignment.chunks == 1:
            return [stage.held_bytes for stage in stages]
        owners = [
            assignment.device_indices(self.devices, number)[0] for number in range(len(stages))
        ]
        held: dict[int, int] = {}
        for owner, stage in zip(owners, stages, strict=True):
            held[owner] = held.get(owner, 0) + stage.held_bytes
        return [held[owner] for owner in owners]

    def model_s(self, stages: tuple[StageCost, ...], tied_s: float) -> float:
        """Return the closed-form step time (`docs/concepts/planner.md`)."""
        total_s = sum(stage.whole_s for stage in stages)
        if self.options.schedule == "gpipe":
            total_s += max((stage.microbatches - 1) * stage.forward_s for stage in stages)
            total_s += max((stage.microbatches - 1) * stage.backward_s for stage in stages)
        else:
            total_s += max((stage.microbatches - 1) * stage.whole_s for stage in stages)
        return total_s + max(stage.exposed_sync_s for stage in stages) + tied_s

    def value(self, assignment: Assignment, stages: tuple[StageCost, ...], tied_s: float) -> float:
        """Return the value of the requested objective."""
        objective, counts = self.options.objective, assignment.replicas
        if objective == "throughput":
            slowest_s = max(
                stage.whole_s / count for stage, count in zip(stages, counts, strict=True)
            )
            sync_s = max(stage.sync_s for stage in stages)
            return slowest_s + sync_s * (1 / self.options.num_microbatches)
        if objective == "latency":
            return sum(stage.forward_s + stage.send_forward_s for stage in stages)
        if objective == "memory":
            return float(max(stage.memory.total_bytes for stage in stages))
        if objective == "devices":
            return float(sum(counts))
        if objective == "balance_size":
            return float(max(stage.size_bytes for stage in stages))
        if objective == "balance_time":
            return max(stage.forward_s + stage.backward_s for stage in stages)
        return self.model_s(stages, tied_s)

    def times(
        self,
        assignment: Assignment,
        stages: tuple[StageCost, ...],
        tied_s: float,
        direct_sends: tuple[DirectSend, ...] = (),
    ) -> StageTimes:
        """Return the durations the simulator needs."""
        forward, backward = self.links.channels(assignment)
        split = stages if self._has_parts else ()
        return StageTimes(
            forward_s=[stage.forward_s for stage in stages],
            backward_s=[stage.backward_s for stage in stages],
            backward_input_s=[stage.input_s for stage in split],
            backward_weight_s=[stage.backward_s - stage.input_s for stage in split],
            send_forward_s=[stage.send_forward_s for stage in stages[:-1]],
            send_backward_s=[stage.send_backward_s for stage in stages[1:]],
            sync_s=[stage.sync_s for stage in stages],
            tied_sync_s=tied_s,
            forward_channel=forward,
            backward_channel=backward,
            skips=skip_times(direct_sends),
        )

    def _evaluate(self, assignment: Assignment) -> CostedPlan:
        """Compute all costs of a plan."""
        stages = self.stages(assignment)
        tied_s = self.tied_sync_s(assignment)
        value, model_s = self.value(assignment, stages, tied_s), self.model_s(stages, tied_s)
        step_s, bubble = self._simulated(assignment, stages, tied_s)
        sends: tuple[DirectSend, ...] = ()
        other_s = None
        if skips := self.skips(assignment):
            past, straight = self.stages(assignment, skips), self.links.direct(assignment, skips)
            past_s, past_bubble = self._simulated(assignment, past, tied_s, straight)
            other_s = max(past_s, step_s)
            # Direct sends may cross a slower link level or contend for a shared one, and so lose.
            if past_s <= step_s:
                stages, sends, step_s, bubble = past, straight, past_s, past_bubble
        if self.options.objective == "step_time" and self.schedule not in CLOSED_FORM:
            value = step_s
        forward, backward = self.links.channels(assignment)
        return CostedPlan(
            assignment=assignment,
            stages=stages,
            tied_sync_s=tied_s,
            value=value,
            model_s=model_s,
            step_time_s=step_s,
            bubble_fraction=bubble,
            forward_channels=forward,
            backward_channels=backward,
            direct_sends=sends,
            other_step_s=other_s,
        )

    def _simulated(
        self,
        assignment: Assignment,
        stages: tuple[StageCost, ...],
        tied_s: float,
        direct_sends: tuple[DirectSend, ...] = (),
    ) -> tuple[float, float]:
        """Simulate the step and return its time and bubble fraction."""
        return step_time(
            self.schedule,
            self.times(assignment, stages, tied_s, direct_sends),
            self.num_microbatches,
            assignment.replicas,
            [stage.in_flight for stage in stages] if self.schedule == "1f1b" else (),
            assignment.chunks,
        )

    def evaluate_if_feasible(self, assignment: Assignment | None) -> CostedPlan | None:
        """Evaluate a plan; return None if it does not fit in memory or the schedule rejects it."""
        if assignment is None:
            return None
        try:
            if not self.fits(self.stages(assignment), assignment):
                return None
            return self.evaluate(assignment)
        except InvalidInput:
            return None

    def least_step_s(
        self, assignment: Assignment, stages: tuple[StageCost, ...], tied_s: float
    ) -> float:
        """Return a lower bound of the plan's simulated step time in O(stages).

        A device starts when the first micro-batch has come to the first of its stages, and what it
        does last runs back from there to the front, or is summed over the stage's replicas.
        """
        if skips := self.skips(assignment):  # what is sent straight is not sent over the cuts
            stages = self.stages(assignment, skips)
        splits, laps = self.schedule in SPLIT_BACKWARD, assignment.chunks > 1
        bound_s = sum(
            stage.forward_s + (stage.input_s if splits else stage.backward_s) + stage.outgoing_s
            for stage in stages
        )
        busy_s, edges_s = [0.0] * len(stages), [0.0] * len(stages)
        front_s = back_s = 0.0
        for number, stage in enumerate(stages):
            owner = self._first_stage(assignment, number) if laps else number
            back_s += stage.send_backward_s
            if owner == number:
                after_s = stage.sync_s if assignment.chunks == 1 else 0.0
                edges_s[owner] = front_s + max(after_s, 0.0 if splits else back_s)
            busy_s[owner] += stage.microbatches * (stage.forward_s + stage.backward_s)
            front_s += stage.forward_s + stage.send_forward_s
            back_s += stage.backward_s
        return max(bound_s, *map(sum, zip(busy_s, edges_s, strict=True))) + tied_s

    def _first_stage(self, assignment: Assignment, stage: int) -> int:
        """Return the first of the stages that share this stage's devices."""
        positions = assignment.num_stages // assignment.chunks
        lap, place = divmod(stage, positions)
        return positions - 1 - place if self.schedule in FOLDED and lap else place


MAX_KEPT = 64
"""Tables kept, and 64 times as many rows."""


class StageMemoryTables:
    """Memory of many stages at once, as `CostModel.memory` computes it for one.

    Positions are indices of the tables. What was asked for last is kept.
    """

    def __init__(self, costs: ChainCosts, options: PlanOptions, num_microbatches: int) -> None:
        self.costs, self.options, self.num_microbatches = costs, options, num_microbatches
        self.training = training_bytes(options.precision, options.optimizer)
        self.row = lru_cache(maxsize=64 * MAX_KEPT)(self._row)
        self.table = lru_cache(maxsize=MAX_KEPT)(self._table)

    def _row(self, first: int, again: bool, depth: int, replicas: int) -> Bytes:
        """Return the bytes of a stage from ``first`` to each position behind it."""
        row: Bytes = self._needed(slice(first, first + 1), again, depth, replicas)[0]
        return row

    def _table(self, again: bool, depth: int, replicas: int) -> Bytes:
        """Return the bytes of the stages between all pairs of positions."""
        return self._needed(slice(None), again, depth, replicas)

    def _needed(self, firsts: slice, again: bool, depth: int, replicas: int) -> Bytes:
        costs = self.costs
        saved = costs.saved_bytes[firsts]
        inputs = costs.input_bytes[firsts, None]
        share = -(-self.num_microbatches // replicas)
        shared = list_shared(self.options, costs, firsts)
        found: Bytes = (
            costs.weights_bytes[firsts]
            + costs.gradients_bytes[firsts]
            + self.training.of(costs.learned_elements[firsts])
            - shared.divided
            + np.minimum(shared.divided, held_share(shared, replicas))
            + (inputs * depth + saved if again else saved * depth)
            + costs.workspace_bytes[firsts]
            + min(share, POSTED_AHEAD)
            * (costs.arriving_bytes[firsts, None] + costs.returning_bytes)
        )
        return found
