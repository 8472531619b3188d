"""Plans for schedules whose step has no closed form: chosen by simulation alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.units import format_bytes
from .assignment import Assignment, Cuts
from .candidates import equal_layers, even_times, neighbours, with_recompute
from .fitted import fitted_cuts
from .layout import SEVERAL_STAGES, make_layout
from .price import Priced
from .race import Race
from .request import Request
from .search import GAVE_UP
from .spread import spreads
from .squeeze import squeezed

MAX_RANKS = 64
"""Pipelines of more devices are not tried; more replicas are."""

MAX_SHAPES = 32
"""Shapes tried first, those of the least ideal step; the others only if none of these fits."""

MAX_MOVES = 32
"""How often a cut of the fastest plan is moved."""

MAX_MISFITS = 200
"""Candidates among which the one that misses by least is looked for."""


MAX_SQUEEZED = 12
"""Candidates that do not fit whose cuts are moved until they do."""

Misfit = tuple[float, int, int, int]
"""How much of its limit a device needs; both in bytes, and its index in the cluster."""


@dataclass(frozen=True, order=True)
class Shape:
    """Devices a pipeline has, and how many copies of it there are; least ideal step first."""

    ideal_s: float
    ranks: int
    replicas: int


@dataclass(frozen=True)
class Several:
    """Plans of a request whose schedule has no closed form."""

    request: Request

    @property
    def chunks(self) -> int:
        """Stages a device."""
        options = self.request.options
        if options.schedule == "zbv":
            return 2
        return options.chunks if options.schedule in SEVERAL_STAGES else 1

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

    def candidates(self, shapes: list[Shape]) -> Iterator[Assignment]:
        """Even times, equal layer counts and cuts by speed and memory, placed in many ways."""
        request, options = self.request, self.request.options
        costs, pricer = request.costs, request.pricer
        for place, shape in enumerate(shapes):
            if place and self.request.is_over:
                return
            num_stages = shape.ranks * self.chunks
            even = even_times(costs, num_stages)
            equal = equal_layers(len(costs.profile.layers), num_stages)
            if even is None:
                continue
            for spread in spreads(shape.ranks, shape.replicas, request.devices):
                one = self._repeated(spread, even)
                for cuts in dict.fromkeys((even, equal)):
                    if costs.has(cuts):
                        yield with_recompute(pricer, replace(one, cuts=cuts))
                for again in {"never": (False,), "auto": (False, True), "always": (True,)}[
                    options.recompute
                ]:
                    again_all = replace(one, recompute=(again,) * num_stages)
                    fitted = fitted_cuts(pricer, again_all)
                    if fitted is not None:
                        yield replace(again_all, cuts=fitted)

    def _repeated(self, one: Assignment, cuts: Cuts) -> Assignment:
        """Every device takes one stage of each round; zbv's second round runs back."""
        classes, ends = one.classes, one.ends
        folds = self.request.options.schedule == "zbv"
        for _ in range(1, self.chunks):
            classes += one.classes[::-1] if folds else one.classes
            ends += one.ends[::-1] if folds else one.ends
        return replace(
            one,
            cuts=cuts,
            replicas=one.replicas * self.chunks,
            classes=classes,
            ends=ends,
            recompute=one.recompute * self.chunks,
            chunks=self.chunks,
        )

    def bound_s(self) -> float:
        """No step is below: all work on all devices, or one micro-batch through the model."""
        request = self.request
        work_s = float(request.costs.forward_s[0, -1] + request.costs.backward_s[0, -1])
        speeds = sum(device.speed for device in request.cluster.devices)
        shared_s = request.options.num_microbatches * work_s / speeds
        through_s = request.pricer.through_s(
            float(request.costs.forward_s[0, -1]), float(request.costs.backward_s[0, -1])
        )
        return max(shared_s, through_s / request.devices.fastest) * (1 - 1e-12)

    @cached_property
    def misfits(self) -> list[tuple[Misfit, Assignment]]:
        """Candidates where none fits, the one that misses by least first."""
        allowed = filter(self.request.allows, self.candidates(self.shapes))
        found = [(self._missing(entry), entry) for entry in islice(allowed, MAX_MISFITS)]
        return sorted(found)

    def squeezed(self) -> Iterator[Assignment]:
        """Those that miss by least with their cuts moved until they fit."""
        for _, entry in self.misfits[:MAX_SQUEEZED]:
            if self.request.is_over:
                return
            found = squeezed(self.request.pricer, entry)
            if found is not None:
                yield found

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

    def _no_counts(self) -> Infeasible:
        options, chunks = self.request.options, self.chunks
        wanted, name = options.num_stages, options.schedule
        if wanted is not None and wanted % chunks:
            return Infeasible(
                f"the {name} schedule puts {chunks} stages on each device, and num_stages={wanted} "
                f"is not a multiple of {chunks}",
                constraint="schedule",
                required=wanted,
                available=wanted // chunks * chunks,
            )
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


def best_of_schedule(request: Request) -> tuple[Priced, float]:
    """The fastest plan found, and a time no plan is below.

    Cuts of even times, of equal layer counts, and by each device's speed and memory, for numbers
    of devices a pipeline may have and ways to place it; where none fits, those that nearly do with
    their cuts moved. Then cuts of the fastest are moved one by one while that helps.

    Raises:
        Infeasible: None of them fits.
        DeadlineExceeded: None that was tried by then fits.
    """
    several, race = Several(request), Race(request)
    race.enter(several.candidates(several.shapes[:MAX_SHAPES]))
    if race.best is None:
        race.enter(several.candidates(several.shapes[MAX_SHAPES:]))
    if race.best is None:
        race.enter(several.squeezed())
    for _ in range(MAX_MOVES):
        before = race.best
        if before is None or not request.costs.has(before.assignment.cuts):
            break
        race.enter(neighbours(before.assignment, request.costs))
        if race.best is before:
            break
    if race.best is None and request.is_over:
        raise DeadlineExceeded(GAVE_UP)
    if race.best is None:
        raise several.no_plan()
    return race.best, min(several.bound_s(), race.best.step_time_s)
