"""Plans for schedules whose step has no closed form: chosen by simulation alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby, islice, product

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ...core.units import format_bytes
from ...schedules import numba_jit as jit
from ...schedules.layout import make_layout
from ...schedules.traits import FOLDED
from ..cost.assignment import Assignment, Cuts, repeated
from ..cost.plan_cost import Priced
from ..heuristics.candidates import apply_recompute, equal_layers, even_times
from ..problem.input_checks import chunks_of
from ..problem.problem import PlanningRequest
from ..search.branch_and_bound import GAVE_UP
from .cut_fitting import Ways, fitted
from .device_layouts import spreads
from .memory_repair import squeezed
from .simulated_bound import LeastStep
from .tournament import Race

MAX_RANKS = 64
"""Pipelines of more devices are not tried; more replicas are."""

MAX_SHAPES = 32
"""Shapes tried first, those of the least ideal step; the others only if none of these fits."""

MAX_STAGES = 40_000
"""Stages of all candidates that are priced in one go: a second."""

MAX_ACTIONS = 500_000
"""Actions played to choose among candidates, and as many again to improve the fastest: a second
each without compiled code."""

MAX_ROUNDS = 32
"""How often the fastest plans are changed a little."""

MAX_STARTS = 3
"""Plans of different stages and devices that are changed in each round."""

NEAR = 0.5
"""How far above the fastest plan, relatively, others are still worth changing."""

SLACK = 0.1
"""How far a plan's bound may be above the fastest, relatively: small changes may gain as much."""

MAX_SHIFTED = 16
"""Cuts up to which rows of them are moved together."""

MAX_MISFITS = 200
"""Candidates among which the one that misses by least is looked for."""

MAX_SQUEEZED = 24
"""Candidates that do not fit whose cuts are moved until they do."""

SMALL = 12
"""Positions up to which those compete with others that fit as they are."""

GRACE_S = 0.5
"""How long a plan is still looked for behind the deadline while there is none."""

ACTIONS_PER_S = 100_000
"""Played without compiled code, with room to spare: larger shapes come last if time is short."""

Misfit = tuple[float, int, int, int]
"""How much of its limit a device needs; both in bytes, and its index in the cluster."""


@dataclass(frozen=True, order=True)
class Shape:
    """Devices a pipeline has, and how many copies of it there are; least ideal step first."""

    ideal_s: float
    ranks: int
    replicas: int

    def actions(self, num_microbatches: int, chunks: int) -> int:
        """Of one of its copies, backwards split in two."""
        return 3 * self.ranks * chunks * -(-num_microbatches // self.replicas)


@dataclass(frozen=True)
class Several:
    """Plans of a request whose schedule has no closed form."""

    request: PlanningRequest

    @property
    def chunks(self) -> int:
        """Stages a device."""
        return chunks_of(self.request.options)

    @cached_property
    def counts(self) -> list[tuple[int, int]]:
        """Devices of a pipeline and copies of it, as the options, devices and cuts allow."""
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
            few = set(range(1, limit + 1)) if total <= 16 else {2**k for k in range(16)}
            taken = next((n for n in range(limit, 0, -1) if not self.refusal(ranks, n)), limit)
            found += [(ranks, n) for n in sorted(few | {limit, taken}) if n <= limit]
        return found

    @cached_property
    def _even(self) -> Callable[[int], Cuts | None]:
        """Cuts of even times into so many stages; each number is asked for again and again."""
        return cache(partial(even_times, self.request.costs))

    def refusal(self, ranks: int, replicas: int) -> str | None:
        """Why the schedule does not take these numbers; `None` if it does."""
        options = self.request.options
        counts = (replicas,) * (ranks * self.chunks)
        try:
            make_layout(options.schedule, options.num_microbatches, counts, self.chunks)
        except InvalidInput as error:
            return str(error)
        return None

    @cached_property
    def shapes(self) -> list[Shape]:
        """Those the schedule takes, by the step they had if work could be cut anywhere."""
        found = []
        for ranks, replicas in self.counts:
            if self.refusal(ranks, replicas) is None:
                share = -(-self.request.options.num_microbatches // replicas)
                bubble = (ranks - 1) / self.chunks
                found.append(Shape((share + bubble) / ranks, ranks, replicas))
        return sorted(found)

    def promising(self) -> list[Shape]:
        """The best of them, those first that can be played in a tenth of the time there is.

        Or within the grace: however little time there is, it is one plan's, and the most promising
        one is worth it.
        """
        play_s = max((self.request.deadline - time.monotonic()) / 10, GRACE_S)
        m = self.request.options.num_microbatches
        return sorted(
            self.shapes, key=lambda shape: shape.actions(m, self.chunks) > play_s * ACTIONS_PER_S
        )[:MAX_SHAPES]

    @property
    def roomy(self) -> list[Shape]:
        """Shapes that leave a device least to hold come first."""
        return sorted(self.shapes, key=lambda shape: (-shape.ranks, -shape.replicas))

    def candidates(self, shapes: list[Shape], *, once: bool = False) -> Iterator[Assignment]:
        """Even times, equal layer counts and cuts by speed and memory, placed in many ways.

        Args:
            shapes: In this order.
            once: Only the cuts by speed and memory that need least memory.
        """
        request = self.request
        left = MAX_STAGES
        for shape in shapes:
            num_stages = shape.ranks * self.chunks
            even = self._even(num_stages)
            if even is None:
                continue
            equal = equal_layers(len(request.costs.profile.layers), num_stages)
            for spread in spreads(shape.ranks, shape.replicas, request.devices, self.kinds):
                if left < 0 or (self.is_late if once else request.is_over):
                    return
                one = self._repeated(spread, even)
                if not once:
                    for cuts in dict.fromkeys((even, equal)):
                        if request.costs.has(cuts):
                            left -= num_stages
                            yield apply_recompute(request.pricer, replace(one, cuts=cuts))
                for made in self._fitted(one, once=once):
                    left -= num_stages
                    yield made

    def _fitted(self, one: Assignment, *, once: bool) -> Iterator[Assignment]:
        found = (
            fitted(self.request.pricer, one, ways)
            for ways in (self.ways[-1:] if once else self.ways)
        )
        yield from dict.fromkeys(entry for entry in found if entry is not None)

    @property
    def ways(self) -> list[Ways]:
        """Whether stages may be recomputed; the last takes least memory."""
        ways: dict[str, list[Ways]] = {
            "never": [(False,)], "always": [(True,)], "auto": [(False,), (True,), (False, True)],
        }  # fmt: skip
        return ways[self.request.options.recompute]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that pinned layers need, in the order of the layers, none twice in a row."""
        profile, options = self.request.profile, self.request.options
        index = {entry.layer.name: layer for layer, entry in enumerate(profile.layers)}
        pins = sorted((index[pin.layer], pin.kind) for pin in options.pins if pin.kind is not None)
        return tuple(kind for kind, _ in groupby(kind for _, kind in pins))

    @property
    def pinned(self) -> bool:
        """Whether not all cuts are as good as any."""
        return bool(self.request.options.pins)

    @property
    def is_late(self) -> bool:
        """Whether to give up where there is no plan yet."""
        return time.monotonic() > self.request.deadline + GRACE_S

    def _repeated(self, one: Assignment, cuts: Cuts) -> Assignment:
        """Every device takes one stage of each round; the second round of a V runs back."""
        folds = self.request.options.schedule in FOLDED
        return repeated(one, cuts, self.chunks, folds=folds)

    @cached_property
    def misfits(self) -> list[tuple[Misfit, Assignment]]:
        """Candidates where none fits, the one that misses by least first."""
        allowed = filter(self.request.allows, self._roughly(self.roomy))
        found = [(self._missing(entry), entry) for entry in islice(allowed, MAX_MISFITS)]
        return sorted(found)

    def squeezed(self) -> Iterator[Assignment]:
        """Those that fit as the pins place them, and those that nearly do, their cuts moved."""
        yield from (entry for (fullness, *_), entry in self.misfits if fullness <= 1)
        misfits = [entry for (fullness, *_), entry in self.misfits if fullness > 1]
        for entry in misfits[:MAX_SQUEEZED]:
            if self.is_late:
                return
            allows = self.request.allows if self.pinned else None
            yield from squeezed(self.request.pricer, entry, self.ways[-1], allows)

    def no_plan(self) -> Infeasible:
        """Why there is none."""
        options = self.request.options
        name, m = options.schedule, options.num_microbatches
        if not self.counts:
            return self._no_counts()
        if not self.shapes:
            return Infeasible(
                f"{self.refusal(*self.counts[0])}; ask for another number than "
                f"num_microbatches={m}, or for the 1f1b schedule",
                constraint="schedule",
            )
        if not self.misfits:
            return Infeasible(
                f"no plan of the {name} schedule that was tried keeps all constraints of the "
                "options: pins, layers to keep together, cuts that are forbidden; drop one of "
                "them, or use the 1f1b schedule, whose plans are all searched",
                constraint="constraints",
                required=1,
                available=0,
            )
        (_, needed, limit, device), _ = self.misfits[0]
        return Infeasible(
            f"no plan of the {name} schedule was found that fits the devices' memory: in the one "
            f"that misses by least, device {self.request.cluster.devices[device].name!r} needs "
            f"{format_bytes(needed)} ({needed} bytes) for "
            f"{'its stages' if self.chunks > 1 else 'its stage'} and allows "
            f"{format_bytes(limit)} ({limit} bytes)",
            constraint="memory",
            required=needed,
            available=limit,
        )

    def _roughly(self, shapes: list[Shape]) -> Iterator[Assignment]:
        """Even times, as far as pins allow, and recomputed wherever that is allowed."""
        request = self.request
        again = request.options.recompute != "never"
        for shape in shapes:
            num_stages = shape.ranks * self.chunks
            even = self._even(num_stages)
            if even is None:
                continue
            for spread in spreads(shape.ranks, shape.replicas, request.devices, self.kinds):
                if self.is_late:
                    return
                one = replace(self._repeated(spread, even), recompute=(again,) * num_stages)
                made = fitted(request.pricer, one, (again,), limited=False) if self.pinned else one
                if made is not None:
                    yield made

    def _no_counts(self) -> Infeasible:
        options, chunks = self.request.options, self.chunks
        wanted, name = options.num_stages, options.schedule
        atoms = self.request.costs.num_atoms
        most = min(entry for entry in (options.max_stages, wanted, atoms) if entry is not None)
        if most < chunks:
            return Infeasible(
                f"the {name} schedule puts {chunks} stages on each device; the layers, their cuts "
                f"and the options allow only {most}",
                constraint="legal_cuts" if atoms == most else "schedule",
                required=chunks,
                available=most,
            )
        return Infeasible(
            f"{wanted} stages of the {name} schedule, {chunks} a device, are not planned: a "
            f"pipeline has at most {MAX_RANKS} devices, and max_stages is {options.max_stages}",
            constraint="schedule",
            required=wanted,
            available=MAX_RANKS * chunks,
        )

    def _missing(self, assignment: Assignment) -> Misfit:
        """About the fullest device."""
        pricer = self.request.pricer
        stages = pricer.stages(assignment)
        found = [
            (
                held / max(stage.limit_bytes, 1), held, stage.limit_bytes,
                assignment.device_indices(self.request.devices, number)[0],
            )
            for number, (stage, held) in enumerate(
                zip(stages, pricer.held_bytes(stages, assignment), strict=True)
            )
            if stage.limit_bytes is not None
        ]  # fmt: skip
        return max(found, default=(0.0, 0, 0, 0))


def best_of_schedule(request: PlanningRequest) -> tuple[Priced, float]:
    """The fastest plan found, and a time no plan is below.

    Cuts of even times, of equal layer counts, and by each device's speed and memory, for numbers
    of devices a pipeline may have and ways to place it; where none fits, those that nearly do with
    their cuts moved. Then the fastest ones are changed a little, while that helps.

    Raises:
        Infeasible: None of them fits.
        DeadlineExceeded: None that was tried by then fits.
    """
    several = Several(request)
    if several.shapes and request.deadline == math.inf:
        jit.load_if_worthwhile(
            several.shapes[0].actions(request.options.num_microbatches, several.chunks) * 8
        )
    race = Race(request, MAX_ACTIONS, lambda entry: (entry.replicas, entry.classes), SLACK)
    _enter_first(several, race)
    if race.best is None and several.is_late:
        raise DeadlineExceeded(GAVE_UP)
    if race.best is None:
        raise several.no_plan()
    race.max_actions += MAX_ACTIONS
    for _ in range(MAX_ROUNDS):
        starts = race.unexplored(MAX_STARTS, NEAR)
        if not starts or request.is_over:
            break
        for start in starts:
            race.enter(_changed(request, start))
    return race.best, min(LeastStep(request, several.chunks).bound_s(), race.best.step_time_s)


def rescue(request: PlanningRequest, race: Race) -> None:
    """Plans where the search found none and does not know whether there are any."""
    if race.best is None:
        _enter_first(Several(request), race)


def _enter_first(several: Several, race: Race) -> None:
    race.enter(several.candidates(several.promising()))
    if race.best is None:
        race.enter(several.candidates(several.roomy, once=True))
    is_small = several.request.costs.num_atoms <= SMALL
    if race.best is None or (is_small and not several.request.is_over):
        race.enter(several.squeezed())


def _changed(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """One cut or several in a row moved a little, or one stage no longer recomputed."""
    if request.costs.has(assignment.cuts):
        yield from _shifted(request, assignment)
    if request.options.recompute == "auto":
        for stage, again in enumerate(assignment.recompute):
            if again:
                recompute = (
                    *assignment.recompute[:stage],
                    False,
                    *assignment.recompute[stage + 1 :],
                )
                yield replace(assignment, recompute=recompute)


def _shifted(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """One or two layers moved between stages, those between them shifted: near ones first."""
    positions, index = request.costs.positions, request.costs.index
    cuts = [index[cut] for cut in assignment.cuts]
    count = len(cuts) - 2
    for length in range(1, count + 1 if count <= MAX_SHIFTED else 2):
        for first, step in product(range(1, count - length + 2), (-1, 1, -2, 2)):
            moved = list(cuts)
            moved[first : first + length] = [cut + step for cut in cuts[first : first + length]]
            if (
                moved[first - 1] < moved[first]
                and moved[first + length - 1] < moved[first + length]
            ):
                yield replace(assignment, cuts=tuple(positions[entry] for entry in moved))
