"""All plans of a schedule with equal replicas, where they are few enough to simulate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

from ...schedules.traits import FOLDED
from ..cost.assignment import Assignment, repeat_rounds
from ..problem.problem import PlanningRequest
from ..search.step_graph import StepState, list_places
from .tournament import Tournament

MAX_PLANS = 5_000
"""Plans up to which all are simulated, but those whose bound rules them out."""


MAX_ACTIONS = 5_000_000
"""Actions that all their steps may have: 0.1 s compiled."""


def simulate_all(
    request: PlanningRequest, shapes: list[tuple[int, int]], chunks: int, tournament: Tournament
) -> float:
    """Add the fastest of all plans if they are few; return the bound that this proves, or 0."""
    plans = list_all_plans(request, shapes, chunks)
    if plans is None:
        return 0.0
    m = request.options.num_microbatches
    actions = sum(3 * plan.num_stages * -(-m // plan.replicas[0]) for plan in plans)
    if actions > MAX_ACTIONS:
        return 0.0
    own = Tournament(request, max_actions=2 * MAX_ACTIONS)
    if tournament.best is not None:
        own.add_simulated(tournament.best)
    own.add(plans)
    if own.best is None or request.is_over:
        return 0.0
    tournament.add_simulated(own.best)
    # Of the places on equal levels only one was simulated; where they differ, it bounds nothing.
    return own.best.step_time_s if request.devices.has_equal_places else 0.0


def list_all_plans(
    request: PlanningRequest, shapes: list[tuple[int, int]], chunks: int
) -> list[Assignment] | None:
    """Return every plan of these numbers of places and replicas; `None` if there are too many.

    Pins and memory are left to the caller. A stage begins at a position of the tables.
    """
    positions, choices = request.positions, {"never": 1, "always": 1, "auto": 2}
    layouts, left = [], MAX_PLANS
    for places, replicas in shapes:
        stages = places * chunks
        cuts = math.comb(len(positions) - 2, stages - 1)
        each = cuts * choices[request.options.recompute] ** stages
        if each > left:
            return None
        for layout in _list_layouts(request, places, replicas):
            left -= each
            if left < 0:
                return None
            layouts.append(layout)
    return [plan for layout in layouts for plan in _cut(request, layout, chunks)]


def _list_layouts(request: PlanningRequest, places: int, replicas: int) -> Iterator[Assignment]:
    """Yield all ways to put the places of a pipeline on devices, from the last one to the first."""
    devices = request.devices
    root = StepState(tuple(len(entry) for entry in devices.classes))

    def extend(state: StepState, behind: tuple[tuple[int, int], ...]) -> Iterator[Assignment]:
        if len(behind) == places:
            yield Assignment(
                cuts=tuple(range(places + 1)),
                replicas=(replicas,) * places,
                classes=tuple(number for number, _ in behind),
                ends=tuple(end for _, end in behind),
                recompute=(False,) * places,
            )
            return
        for number in range(len(devices.classes)):
            if state.free[number] < replicas:
                continue
            for end, _ in list_places(devices, state, number, replicas):
                free = list(state.free)
                free[number] = end - replicas
                target = StepState(tuple(free), device_class=number, begin=end - replicas)
                yield from extend(target, ((number, end), *behind))

    yield from extend(root, ())


def _cut(request: PlanningRequest, layout: Assignment, chunks: int) -> Iterator[Assignment]:
    """Yield all cuts and recomputations of a layout, every device with a stage of each round."""
    positions, options = request.positions, request.options
    stages = layout.num_stages * chunks
    again = {"never": (False,), "auto": (False, True), "always": (True,)}[options.recompute]
    folds = options.schedule in FOLDED
    for inner in combinations(positions[1:-1], stages - 1):
        cuts = (0, *inner, positions[-1])
        one = repeat_rounds(layout, cuts, chunks, folds=folds)
        for recompute in product(again, repeat=stages):
            yield Assignment(
                cuts, one.replicas, one.classes, one.ends, recompute, chunks=one.chunks
            )
