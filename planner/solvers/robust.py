"""Plans whose worst case within the error bands of the profile and the links is the best.

A step never gets shorter when a layer or a message takes longer: each stage works in a fixed order
and waits for what it needs. So the worst case of every plan is the same one, with each layer and
each message at the upper end of its own band, and the best plan of that problem is the robust one.
(Messages that queue for one network card may change places, so that there it is a rule.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.errors import DeadlineExceeded
from ...core.profile.profile import Profile, Timing
from ...core.profile.scale import PartT
from ...core.units import format_time
from ..cost.plan_cost import CostedPlan, Decision
from ..problem.problem import PlanningRequest

LARGEST_BAND = 0.9
"""A wider band says nothing of the worst case; ten times as long as predicted is taken."""

Solve = Callable[[PlanningRequest], Decision]


def solve_robust(request: PlanningRequest, solve: Solve) -> Decision:
    """Return the plan of least worst case, with the bounds of all plans at the expected times.

    Half of the time left goes to the best plan at the expected times, whose bound is the proof's
    and which is kept where its worst case is no worse.
    """
    plain = request.options.model_copy(update={"robust": False})
    left_s = request.deadline - time.monotonic()
    middle = request.deadline if left_s == math.inf else request.deadline - left_s / 2
    expected = solve(replace(request, options=plain, deadline=middle, progress=None))
    profile, cluster = slow_down(request.profile, request.cluster)
    if profile is request.profile and cluster is request.cluster:
        return replace(expected, notes=("robust: neither profile nor links have an error band",))
    worst = replace(
        request, profile=profile, cluster=cluster, options=plain, table_of=None, progress=None
    )
    try:
        careful = solve(worst).costed
    except DeadlineExceeded:
        return replace(expected, notes=("robust: no plan for the worst case was found in time",))
    usual = worst.cost_model.evaluate(expected.costed.assignment)
    if request.cost(usual) <= request.cost(careful):
        text = f"robust: the best plan is the best at worst, too ({_format(request, usual)})"
        return replace(expected, notes=(text,))
    costed = request.cost_model.evaluate(careful.assignment)
    text = (
        f"robust: at worst {_format(request, careful)} against {_format(request, usual)} for the "
        f"best plan at the expected times, which takes {_format(request, expected.costed)} then; "
        f"this one {_format(request, costed)}"
    )
    return replace(expected, costed=costed, notes=(text,))


def slow_down(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return the profile and the cluster at the upper ends of their bands."""
    whole = profile.provenance.error_band or 0.0
    bands = [entry.error_band for entry in profile.layers]
    bands += [profile.loss.error_band] if profile.loss else []
    if whole or any(bands):
        loss = None if profile.loss is None else _slow_layer(profile.loss, whole)
        layers = tuple(_slow_layer(entry, whole) for entry in profile.layers)
        profile = profile.model_copy(update={"layers": layers, "loss": loss})
    if any(level.error_band for level in cluster.levels):
        levels = tuple(_slow_link(level) for level in cluster.levels)
        cluster = cluster.model_copy(update={"levels": levels})
    return profile, cluster


def _slow_layer(entry: PartT, whole: float) -> PartT:
    """Slow a layer (or the loss) by its own band; by the profile's if it has none."""
    factor = _worst_factor(whole if entry.error_band is None else entry.error_band)
    slowed = {
        name: timing.model_copy(update={"median_s": timing.median_s * factor})
        for name, timing in entry
        if isinstance(timing, Timing)
    }
    return entry.model_copy(update=slowed)


def _slow_link(level: LinkLevel) -> LinkLevel:
    factor = _worst_factor(level.error_band or 0.0)
    return level.scale(bandwidth_factor=1 / factor, delay_factor=factor)


def _worst_factor(band: float) -> float:
    """Return how many times as long as predicted something takes at worst.

    Errors are relative to what is measured, so that half of it, predicted, is an error of a half.
    """
    return 1 / (1 - min(band, LARGEST_BAND))


def _format(request: PlanningRequest, costed: CostedPlan) -> str:
    return format_time(request.cost(costed))
