"""Search for schedules whose step has no closed form: candidates chosen by simulation alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby, islice, product

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ...core.units import format_bytes
from ...schedules.layout import make_layout
from ...schedules.traits import FOLDED
from ..cost.assignment import Assignment, Cuts, repeat_rounds
from ..cost.plan_cost import CostedPlan
from ..cost.sharing import check_gathering
from ..heuristics.candidates import apply_recompute, even_times
from ..problem.input_checks import count_chunks
from ..problem.problem import PlanningRequest
from ..problem.regular import get_rule, list_equal_cuts
from ..search.branch_and_bound import GAVE_UP
from .all_plans import simulate_all
from .cut_fitting import RECOMPUTE_CHOICES, RecomputeChoices, fit_cuts, repair_memory
from .device_layouts import list_device_layouts
from .simulated_bound import SimulatedStepBound
from .stage_moves import flip_recompute, move_devices
from .step_proof import search_steps
from .tournament import Tournament

MAX_RANKS = 64
"""Longest pipeline tried, in devices; replicas may use more."""

MAX_SHAPES = 32
"""Shapes tried first, those of the least ideal step; the others only if none of these fits."""

MAX_STAGES = 40_000
"""Stages of all candidates that are costed in one go: a second."""

MAX_ACTIONS = 500_000
"""Actions simulated to choose among candidates, and twice as many to improve the fastest: a second
or two without compiled code."""

MAX_ROUNDS = 32
"""Rounds in which the fastest plans are varied."""

MAX_STARTS = 3
"""Plans of different stages and devices that are varied in each round."""

NEAR = 0.1
"""Relative distance from the fastest plan within which others are worth varying."""

SLACK = 0.1
"""Relative distance from the fastest plan that bounds may have: variations may gain as much."""

MAX_SHIFTED = 16
"""Cuts up to which runs of them are moved together."""

MAX_INFEASIBLE = 200
"""Candidates among which the closest infeasible one is looked for."""

MAX_REPAIRED = 24
"""Infeasible candidates whose cuts are moved until they fit."""

SMALL = 12
"""Positions up to which repaired candidates compete even if others fit as they are."""

GRACE_S = 0.5
"""Time beyond the deadline for which a first plan is still looked for."""

ACTIONS_PER_S = 100_000
"""Simulated without compiled code, conservatively: larger shapes come last if time is short."""

Fullness = tuple[float, int, int, int]
"""Share of its limit that a device needs, both in bytes, and its index in the cluster."""


@dataclass(frozen=True, order=True)
class PipelineShape:
    """Devices of a pipeline and number of its copies, ordered by the ideal step."""

    ideal_s: float
    ranks: int
    replicas: int

    def actions(self, num_microbatches: int, chunks: int) -> int:
        """Return the actions of one copy, backwards split in two."""
        return 3 * self.ranks * chunks * -(-num_microbatches // self.replicas)


@dataclass(frozen=True)
class CandidateSource:
    """Candidates for a request whose schedule has no closed form."""

    request: PlanningRequest

    @property
    def chunks(self) -> int:
        """Return the stages per device."""
        return count_chunks(self.request.options)

    @cached_property
    def counts(self) -> list[tuple[int, int]]:
        """Return pairs of devices per pipeline and copies that options, devices and cuts allow."""
        options, total = self.request.options, len(self.request.cluster.devices)
        most = min(total, self.request.costs.num_atoms // self.chunks, MAX_RANKS)
        found = []
        for ranks in range(1, most + 1):
            num_stages = ranks * self.chunks
            if options.num_stages not in (None, num_stages):
                continue
            if options.max_stages is not None and num_stages > options.max_stages:
                continue
            limit = min(options.max_replicas or total, options.num_microbatches, total // ranks)
            # On large clusters only powers of two and the most that the schedule supports.
            few = set(range(1, limit + 1)) if total <= 16 else {2**k for k in range(16)}
            most_supported = next(
                (n for n in range(limit, 0, -1) if not self.rejection_reason(ranks, n)), limit
            )
            found += [(ranks, n) for n in sorted(few | {limit, most_supported}) if n <= limit]
        return found

    @cached_property
    def _even(self) -> Callable[[int], Cuts | None]:
        """Return a cached function from a number of stages to the cuts of even times."""
        return cache(partial(even_times, self.request.costs))

    def rejection_reason(self, ranks: int, replicas: int) -> str | None:
        """Return why the schedule does not support these numbers; `None` if it does."""
        options = self.request.options
        counts = (replicas,) * (ranks * self.chunks)
        try:
            make_layout(options.schedule, options.num_microbatches, counts, self.chunks)
            check_gathering(options, replicas, ranks)
        except InvalidInput as error:
            return str(error)
        return None

    @cached_property
    def shapes(self) -> list[PipelineShape]:
        """Return the supported shapes by their step if work could be cut anywhere."""
        found = []
        for ranks, replicas in self.counts:
            if self.rejection_reason(ranks, replicas) is None:
                share = -(-self.request.options.num_microbatches // replicas)
                bubble = (ranks - 1) / self.chunks
                found.append(PipelineShape((share + bubble) / ranks, ranks, replicas))
        return sorted(found)

    def promising(self) -> list[PipelineShape]:
        """Return the best shapes, first those that simulate in a tenth of the time left.

        However little time is left, one plan may take the grace period, so that the most promising
        shape comes first then.
        """
        budget_s = max((self.request.deadline - time.monotonic()) / 10, GRACE_S)
        m = self.request.options.num_microbatches
        return sorted(
            self.shapes, key=lambda shape: shape.actions(m, self.chunks) > budget_s * ACTIONS_PER_S
        )[:MAX_SHAPES]

    @property
    def roomy(self) -> list[PipelineShape]:
        """Return the shapes, first those that need least memory per device."""
        return sorted(self.shapes, key=lambda shape: (-shape.ranks, -shape.replicas))

    def candidates(
        self, shapes: list[PipelineShape], *, once: bool = False
    ) -> Iterator[Assignment]:
        """Yield plans cut by even times, or by speed and memory, on all layouts; one however late.

        With ``once`` only the cuts by speed and memory that need least memory.
        """
        request = self.request
        left = MAX_STAGES
        for shape in shapes:
            num_stages = shape.ranks * self.chunks
            even = self._even(num_stages)
            if even is None:
                continue
            for layout in self._layouts(shape):
                if left < MAX_STAGES and (left < 0 or (self.is_late if once else request.is_over)):
                    return
                one = self._repeat(layout, even)
                if not once:
                    for cuts in dict.fromkeys((even, *self._equal_blocks(num_stages))):
                        if request.costs.has(cuts):
                            left -= num_stages
                            yield apply_recompute(request.cost_model, replace(one, cuts=cuts))
                every = self.recompute_choices
                fitted = (
                    fit_cuts(request.cost_model, one, choices)
                    for choices in (every[-1:] if once else every)
                )
                for made in dict.fromkeys(entry for entry in fitted if entry is not None):
                    left -= num_stages
                    yield made

    def _equal_blocks(self, num_stages: int) -> Iterator[Cuts]:
        options = self.request.options.model_copy(update={"num_stages": num_stages})
        if get_rule(options) == "equal_blocks":
            yield from list_equal_cuts(self.request.profile, options, num_stages)

    def _layouts(self, shape: PipelineShape) -> Iterator[Assignment]:
        return list_device_layouts(shape.ranks, shape.replicas, self.request.devices, self.kinds)

    @property
    def recompute_choices(self) -> list[RecomputeChoices]:
        """Return the sets of recomputation modes to try; the last needs least memory."""
        return RECOMPUTE_CHOICES[self.request.options.recompute]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that pinned layers need, in layer order, without repetitions."""
        profile, options = self.request.profile, self.request.options
        index = {entry.layer.name: layer for layer, entry in enumerate(profile.layers)}
        pins = sorted((index[pin.layer], pin.kind) for pin in options.pins if pin.kind is not None)
        return tuple(kind for kind, _ in groupby(kind for _, kind in pins))

    @property
    def is_late(self) -> bool:
        """Return True if it is time to give up even without a plan."""
        return time.monotonic() > self.request.deadline + GRACE_S

    def _repeat(self, one: Assignment, cuts: Cuts) -> Assignment:
        # Every device gets one stage of each round; the second round of a V runs backwards.
        folds = self.request.options.schedule in FOLDED
        return repeat_rounds(one, cuts, self.chunks, folds=folds)

    @cached_property
    def by_fullness(self) -> list[tuple[Fullness, Assignment]]:
        """Return candidates whose memory is ignored, the one with the least full device first."""
        allowed = filter(self.request.allows, self._ignore_memory(self.roomy))
        found = [(self._fullest(entry), entry) for entry in islice(allowed, MAX_INFEASIBLE)]
        return sorted(found)

    def repaired(self) -> Iterator[Assignment]:
        """Yield those that fit as pins place them, then the nearest others with cuts moved."""
        yield from (entry for (fullness, *_), entry in self.by_fullness if fullness <= 1)
        too_full = [entry for (fullness, *_), entry in self.by_fullness if fullness > 1]
        for entry in too_full[:MAX_REPAIRED]:
            if self.is_late:
                return
            allows = self.request.allows if self.request.options.pins else None
            yield from repair_memory(
                self.request.cost_model, entry, self.recompute_choices[-1], allows
            )

    def infeasible_error(self) -> Infeasible:
        """Return the error for the case that no candidate fits."""
        options = self.request.options
        name, m = options.schedule, options.num_microbatches
        if not self.counts:
            return self._no_counts()
        if not self.shapes:
            return Infeasible(
                f"{self.rejection_reason(*self.counts[0])} (num_microbatches={m})",
                constraint="schedule",
            )
        if not self.by_fullness:
            return Infeasible(
                f"no plan tried for the {name} schedule keeps all constraints of the options "
                "(pins, together, no_cut_after)",
                constraint="constraints",
                required=1,
                available=0,
            )
        (_, needed, limit, device), _ = self.by_fullness[0]
        return Infeasible(
            f"no plan found for the {name} schedule fits the devices' memory: for example, "
            f"device {self.request.cluster.devices[device].name!r} needs {format_bytes(needed)} "
            f"({needed} bytes) for {'its stages' if self.chunks > 1 else 'its stage'}, but allows "
            f"{format_bytes(limit)} ({limit} bytes)",
            constraint="memory",
            required=needed,
            available=limit,
        )

    def _ignore_memory(self, shapes: list[PipelineShape]) -> Iterator[Assignment]:
        """Yield plans of even times as far as pins allow, recomputed wherever that is allowed."""
        request = self.request
        again = request.options.recompute != "never"
        for shape in shapes:
            num_stages = shape.ranks * self.chunks
            even = self._even(num_stages)
            if even is None:
                continue
            for layout in self._layouts(shape):
                if self.is_late:
                    return
                made: Assignment | None = replace(
                    self._repeat(layout, even), recompute=(again,) * num_stages
                )
                if made is not None and request.options.pins:
                    made = fit_cuts(request.cost_model, made, (again,), limited=False)
                if made is not None:
                    yield made

    def _no_counts(self) -> Infeasible:
        options, chunks = self.request.options, self.chunks
        wanted, name = options.num_stages, options.schedule
        atoms = self.request.costs.num_atoms
        most = min(entry for entry in (options.max_stages, wanted, atoms) if entry is not None)
        if most < chunks:
            return Infeasible(
                f"the {name} schedule puts {chunks} stages on each device, but the layers, their "
                f"cuts and the options allow only {most}",
                constraint="legal_cuts" if atoms == most else "schedule",
                required=chunks,
                available=most,
            )
        return Infeasible(
            f"{wanted} stages of the {name} schedule, {chunks} per device, are too many: a "
            f"pipeline has at most {MAX_RANKS} devices, and max_stages is {options.max_stages}",
            constraint="schedule",
            required=wanted,
            available=MAX_RANKS * chunks,
        )

    def _fullest(self, assignment: Assignment) -> Fullness:
        """Return the fullness of the fullest device."""
        cost_model = self.request.cost_model
        stages = cost_model.stages(assignment)
        found = [
            (
                held / max(stage.limit_bytes, 1), held, stage.limit_bytes,
                assignment.device_indices(self.request.devices, number)[0],
            )
            for number, (stage, held) in enumerate(
                zip(stages, cost_model.held_bytes(stages, assignment), strict=True)
            )
            if stage.limit_bytes is not None
        ]  # fmt: skip
        return max(found, default=(0.0, 0, 0, 0))


def search_by_simulation(request: PlanningRequest) -> tuple[CostedPlan, float]:
    """Return the fastest plan found, and a lower bound on the step of all plans.

    Candidates are cut by even times, or by each device's speed and memory, for
    every shape and layout of a pipeline; if none fits, those that nearly do have their cuts moved.
    Then the fastest ones are varied while that helps.

    Raises:
        Infeasible: No candidate fits.
        DeadlineExceeded: No candidate tried by then fits.
    """
    source = CandidateSource(request)
    tournament = Tournament(
        request, MAX_ACTIONS, lambda entry: (entry.replicas, entry.classes), SLACK
    )
    _add_first(source, tournament)
    if tournament.best is None and source.is_late:
        raise DeadlineExceeded(GAVE_UP)
    if tournament.best is None:
        raise source.infeasible_error()
    # Variations have a budget of their own, however much the candidates took.
    tournament.max_actions += 2 * MAX_ACTIONS
    searched_s = search_steps(request, tournament)
    if not searched_s and request.band is None:
        shapes = [(shape.ranks, shape.replicas) for shape in source.shapes]
        searched_s = simulate_all(request, shapes, source.chunks, tournament)
    for _ in range(MAX_ROUNDS):
        starts = tournament.take_leaders(MAX_STARTS, NEAR)
        if not starts or request.is_over or searched_s >= tournament.best.step_time_s:
            break
        for start in starts:
            tournament.add(_vary(request, start))
    bound_s = max(searched_s, SimulatedStepBound(request, source.chunks).bound_s())
    return tournament.best, min(bound_s, tournament.best.step_time_s)


def add_scheduled_plans(request: PlanningRequest, tournament: Tournament) -> None:
    """Add candidates if an exact search gave up without a plan and without a proof."""
    if tournament.best is None:
        _add_first(CandidateSource(request), tournament)


def _add_first(source: CandidateSource, tournament: Tournament) -> None:
    tournament.add(source.candidates(source.promising()))
    if tournament.best is None:
        tournament.add(source.candidates(source.roomy, once=True))
    is_small = source.request.costs.num_atoms <= SMALL
    if tournament.best is None or (is_small and not source.request.is_over):
        tournament.add(source.repaired())


def _vary(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """Yield plans with a run of cuts moved a little, other devices or one stage's recomputation."""
    if request.costs.has(assignment.cuts):
        yield from _shift_cuts(request, assignment)
        if not assignment.order:
            yield from filter(request.allows, _move_devices(request, assignment))
    if request.options.recompute == "auto":
        yield from flip_recompute(assignment)


def _move_devices(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """Yield plans with devices moved, with their own cuts and with cuts fitted to the devices."""
    for moved in move_devices(assignment, request.cost_model):
        if len(set(moved.replicas)) > 1:
            continue  # only schedules with a closed form allow that
        yield moved
        if moved.num_stages > assignment.num_stages:
            choices = RECOMPUTE_CHOICES[request.options.recompute][-1]
            fitted = fit_cuts(request.cost_model, moved, choices)
            if fitted is not None:
                yield fitted


def _shift_cuts(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """Yield plans with one or two atoms moved between stages, short distances first."""
    positions, index = request.costs.positions, request.costs.index
    cuts = [index[cut] for cut in assignment.cuts]
    count = len(cuts) - 2
    # Moving a run of cuts together shifts work between distant stages, not just neighbours.
    for length in range(1, count + 1 if count <= MAX_SHIFTED else 2):
        for first, step in product(range(1, count - length + 2), (-1, 1, -2, 2)):
            moved = list(cuts)
            moved[first : first + length] = [cut + step for cut in cuts[first : first + length]]
            if (
                moved[first - 1] < moved[first]
                and moved[first + length - 1] < moved[first + length]
            ):
                yield replace(assignment, cuts=tuple(positions[entry] for entry in moved))
