"""A profile at the micro-batch size of a plan."""

from __future__ import annotations

from fractions import Fraction

from ...core.plan.plan import Plan
from ...core.profile.profile import Profile
from ...core.profile.scale import scaled as scaled
from ...core.profile.scale import size_of as size_of


def as_planned(plan: Plan, profile: Profile) -> Profile:
    """The profile at the micro-batch size of a plan that was free to choose it."""
    if plan.options.batch_size is None or not plan.inputs or not profile.inputs:
        return profile
    before, after = profile.inputs[0].shape, plan.inputs[0].shape
    if not before or not after or not before[0] or not after[0]:
        return profile
    return scaled(profile, Fraction(after[0], before[0]))
