"""Options of training that follow from the profile: recipe of precision and memory reserves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...core.cluster.cluster import Device
from ...core.cluster.reserves import usual_reserves
from ...core.errors import InvalidInput
from ...core.models.training_memory import (
    RECIPES,
    BytesPerParameter,
    FloatType,
    Recipe,
    training_bytes,
)
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile, list_parameters
from ..cost.chain import is_learned

USUAL: dict[tuple[FloatType, FloatType | None], Recipe] = {
    ("float32", None): "fp32",
    ("bfloat16", None): "bf16_mixed",
    ("float16", None): "fp16_mixed",
    ("float32", "bfloat16"): "bf16_autocast",
    ("float32", "float16"): "fp16_autocast",
}
"""Recipe that is taken for a type of weights and of autocast, unless one is named."""


def resolve_training_options(
    profile: Profile, options: PlanOptions, devices: Sequence[Device] = ()
) -> PlanOptions:
    """Return the options with recipe and reserves named.

    Raises:
        InvalidInput: The profile is of a model in another precision than the recipe's.
    """
    found = profile.provenance
    update: dict[str, object] = {}
    if options.precision is None:
        update["precision"] = found.precision or _usual(profile)
    else:
        _check(profile, options.precision)
    if options.reserves is None:
        kinds = {each.kind for each in devices}
        # An estimate is of the first kind of device, here a CPU, and has costs of the others.
        is_mixed = found.source == "estimated" and kinds > {"cpu"}
        device = "cuda" if is_mixed else found.device
        update["reserves"] = usual_reserves(device, found.source, len(devices))
    return options.model_copy(update=update) if update else options


def bytes_per_parameter(profile: Profile, options: PlanOptions) -> BytesPerParameter | None:
    """Return the bytes per trainable parameter; `None` if the profile lists no elements."""
    learned = [entry for entry in list_parameters(profile) if is_learned(entry)]
    elements = sum(entry.numel for entry in learned)
    if not elements or options.precision is None:
        return None
    more = training_bytes(options.precision, options.optimizer)
    weights = sum(entry.size_bytes for entry in learned) / elements
    return BytesPerParameter(
        weights=weights,
        gradients=weights + more.gradients,
        weight_copies=more.copies,
        optimizer=float(more.state),
    )


def _usual(profile: Profile) -> Recipe:
    return USUAL.get((_type_of_weights(profile) or "float32", profile.provenance.autocast), "fp32")


def _check(profile: Profile, precision: Recipe) -> None:
    recipe, weights = RECIPES[precision], _type_of_weights(profile)
    autocast = profile.provenance.autocast
    fitting = _list_fitting(profile)
    if precision in fitting:
        return
    under = f" under autocast to {autocast}" if autocast else ""
    raise InvalidInput(
        f"precision {precision!r} means {recipe.text}, but the profile is of {weights} "
        f"weights{under}; plan it as {' or '.join(map(repr, fitting))}, or profile or estimate "
        "the model in that precision",
        field="/options/precision",
    )


def _list_fitting(profile: Profile) -> list[Recipe]:
    """Return the recipes for the type of a profile's weights and of its autocast."""
    weights, autocast = _type_of_weights(profile), profile.provenance.autocast
    return [
        name
        for name, entry in RECIPES.items()
        if entry.weights == (weights or entry.weights) and entry.autocast == autocast
    ]


def list_lighter(profile: Profile, options: PlanOptions) -> list[Recipe]:
    """Return the recipes for a profile that take less memory than its options', heaviest first."""
    own = resolve_training_options(profile, options).precision
    sizes = {
        name: training_bytes(name, options.optimizer).of(1000) for name in _list_fitting(profile)
    }
    lighter = [name for name in sizes if own is not None and sizes[name] < sizes.get(own, 0)]
    return sorted(lighter, key=lambda name: -sizes[name])


def _type_of_weights(profile: Profile) -> FloatType | None:
    """Return the type of most trainable weights; `None` if there are none.

    A profile has their sizes; which type of 16 bits it is, the tensors between layers tell.
    """
    sizes: Counter[int] = Counter()
    for entry in list_parameters(profile):
        if is_learned(entry) and entry.numel:
            sizes[entry.size_bytes // entry.numel] += entry.numel
    if not sizes:
        return None
    if sizes.most_common(1)[0][0] != 2:
        return "float32"
    between = [tensor for boundary in profile.boundaries for tensor in boundary.tensors]
    types = Counter(tensor.dtype for tensor in (*between, *profile.inputs))
    names: tuple[FloatType, ...] = ("bfloat16", "float16", "float32")
    return max(names, key=lambda name: types[name])
