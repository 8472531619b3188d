"""What callers hand over, checked before anything is planned."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...core.profile.scale import get_microbatch_size as get_microbatch_size
from ...core.profile.scale import scale_profile as scale_profile


def profiles_of(profile: Profile | Sequence[Profile]) -> tuple[Profile, ...]:
    """One profile or several, as several.

    Raises:
        InvalidInput: There is none, or something else.
    """
    if isinstance(profile, str) or not isinstance(profile, Sequence):
        return (profile_of(profile),)
    if not profile:
        raise InvalidInput("give at least one profile", field="/profile")
    return tuple(map(profile_of, profile))


def profile_of(profile: Profile | str) -> Profile:
    """The same.

    Raises:
        InvalidInput: It is something else, such as a path.
    """
    if isinstance(profile, Profile):
        return profile
    way_out = (
        f"read it first: Profile.read({str(profile)!r})"
        if isinstance(profile, str | Path)
        else "give a Profile"
    )
    raise InvalidInput(f"the profile is a {type(profile).__name__}; {way_out}", field="/profile")


def plan_of(plan: Plan | str) -> Plan:
    """The same.

    Raises:
        InvalidInput: It is something else, such as a path.
    """
    if isinstance(plan, Plan):
        return plan
    way_out = "give a Plan"
    if isinstance(plan, str | Path):
        way_out = f"read it first: Plan.read({str(plan)!r})"
    raise InvalidInput(f"the plan is a {type(plan).__name__}; {way_out}", field="/plan")


def cluster_of(cluster: Cluster | str) -> Cluster:
    """A cluster, or what its shorthand describes.

    Raises:
        InvalidInput: The shorthand is wrong, or it is something else.
    """
    if isinstance(cluster, str):
        return Cluster.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise InvalidInput(
            f"the cluster is a {type(cluster).__name__}; give a Cluster, or its shorthand such as "
            "'4x24GB'",
            field="/cluster",
        )
    return cluster


def options_of(options: PlanOptions | None) -> PlanOptions:
    """The options, or the defaults.

    Raises:
        InvalidInput: They are something else.
    """
    if options is None:
        return PlanOptions()
    if not isinstance(options, PlanOptions):
        raise InvalidInput(
            f"the options are a {type(options).__name__}; give PlanOptions(num_stages=4, ...)",
            field="/options",
        )
    return options


def deadline_of(deadline_s: float | None) -> float:
    """The moment so many seconds from now, on the clock of `time.monotonic`; infinite for `None`.

    Raises:
        InvalidInput: It is negative, or not a number.
    """
    if deadline_s is None:
        return math.inf
    is_number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
    if not is_number or not deadline_s >= 0:
        raise InvalidInput(
            f"deadline_s is {deadline_s!r}; give seconds from 0 up, or None for no deadline",
            field="/deadline_s",
        )
    return time.monotonic() + deadline_s


def as_planned(plan: Plan, profile: Profile) -> Profile:
    """The profile at the micro-batch size of a plan that was free to choose it."""
    if plan.options.batch_size is None or not plan.inputs or not profile.inputs:
        return profile
    before, after = profile.inputs[0].shape, plan.inputs[0].shape
    if not before or not after or not before[0] or not after[0]:
        return profile
    return scale_profile(profile, Fraction(after[0], before[0]))
