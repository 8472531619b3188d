"""Columns of a plan's or a profile's layers."""

from __future__ import annotations

from ..core.plan.plan import Plan
from ..core.profile.profile import Profile
from .layer_memory import LayerMemory
from .plan_view import LayerColumns


def build_layer_columns(
    plan: Plan, profile: Profile | None, held: LayerMemory | None
) -> LayerColumns:
    """Build the columns of a plan's layers: names and stages, with a profile also costs."""
    names = plan.layer_names
    stages = tuple(index for index, stage in enumerate(plan.stages) for _ in stage.layer_names)
    if profile is None or held is None:
        return LayerColumns(names=names, stages=stages)
    return _costs(profile, held).model_copy(update={"names": names, "stages": stages})


def build_profile_layers(profile: Profile) -> LayerColumns:
    """Build the columns of a profile's layers, all in one stage."""
    return _costs(profile, LayerMemory(profile))


def _costs(profile: Profile, held: LayerMemory) -> LayerColumns:
    entries, gaps = profile.layers, profile.boundaries
    each = [(index,) for index in range(len(entries))]
    return LayerColumns(
        names=tuple(entry.layer.name for entry in entries),
        stages=(0,) * len(entries),
        types=tuple(entry.layer.module_type for entry in entries),
        forward_s=tuple(entry.forward.median_s for entry in entries),
        backward_s=tuple(entry.backward.median_s for entry in entries),
        spread_s=tuple(entry.forward.spread_s + entry.backward.spread_s for entry in entries),
        parameter_bytes=tuple(map(held.weights_bytes, each)),
        saved_bytes=tuple(map(held.saved_bytes, each)),
        cut_bytes=(*(gap.forward_bytes + gap.backward_bytes for gap in gaps), 0),
        cut_reasons=(
            *("" if gap.legal else gap.reason or "the profile forbids it" for gap in gaps),
            "the model ends here",
        ),
    )
