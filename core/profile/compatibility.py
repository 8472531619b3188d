"""Comparison of profiles: same model, kind of device and settings, or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidInput
from ..text_table import truncate
from .profile import Profile

SETTINGS = {
    "source": "measured or estimated",
    "device_name": "device",
    "torch_version": "torch",
    "num_threads": "CPU threads",
    "busy_neighbours": "busy neighbours",
    "autocast": "autocast",
    "tf32": "tf32",
    "compiled": "compiled",
    "cuda_version": "CUDA",
    "driver": "driver",
}
"""Fields of the provenance that affect the measurement, with their names for people."""

Difference = tuple[str, str, str]
"""The name of what differs, and both values."""


def compare(
    what: str, describe: Callable[[Profile], str], one: Profile, other: Profile
) -> list[Difference]:
    """Return the difference between two profiles' descriptions, or an empty list."""
    before, after = describe(one), describe(other)
    return [(what, before, after)] if before != after else []


def setting_differences(one: Profile, other: Profile) -> list[Difference]:
    """List the settings, devices and software versions in which two profiles differ."""
    found = compare(
        "kind of device", lambda each: each.provenance.device.partition(":")[0], one, other
    )
    for field, name in SETTINGS.items():
        before, after = getattr(one.provenance, field), getattr(other.provenance, field)
        if before != after:
            found.append((name, _text(before), _text(after)))
    if one.provenance.source == other.provenance.source == "measured":
        found += compare(  # a graph is measured without its code, on random weights
            "run of the whole model (a graph has none)",
            lambda each: "none" if each.reconciliation is None else "timed",
            one,
            other,
        )
    return found


def model_differences(one: Profile, other: Profile) -> list[Difference]:
    """List the ways in which two profiles are not of the same model cut into the same layers."""
    found = compare("model", lambda each: each.model, one, other)
    found += compare("family or configuration", lambda each: str(each.spec), one, other)
    names = [[entry.layer.name for entry in profile.layers] for profile in (one, other)]
    found += _first_difference("layers", *names)
    weights = [
        [str((entry.names[0], entry.size_bytes)) for entry in profile.parameters]
        for profile in (one, other)
    ]
    found += _first_difference("parameters", *weights)
    if weights[0] == weights[1]:
        frozen = [
            [f"{entry.names[0]} {'trained' if entry.trainable else 'frozen'}" for entry in each]
            for each in (one.parameters, other.parameters)
        ]
        found += _first_difference("trainable parameters", *frozen)
    # The first dimension is the number of samples, in which profiles to be merged may differ.
    found += compare(
        "inputs beside the samples",
        lambda each: str([(entry.name, entry.shape[1:], entry.dtype) for entry in each.inputs]),
        one,
        other,
    )
    return found + compare("loss", lambda each: "one" if each.loss else "none", one, other)


def forward_differences(one: Profile, other: Profile) -> list[Difference]:
    """List signs that the same layers of two profiles compute different things."""
    sent = [
        [
            f"after {boundary.after}: {tensor.name} of {len(tensor.shape)} dimensions"
            for boundary in profile.boundaries
            for tensor in boundary.tensors
        ]
        for profile in (one, other)
    ]
    found = _first_difference("tensors between layers", *sent)
    same_size = _shapes(one) == _shapes(other)
    if same_size and _has_classes(one) and _has_classes(other):
        classes = [
            [f"{entry.layer.name} of class {entry.layer.cost_class}" for entry in profile.layers]
            for profile in (one, other)
        ]
        found += _first_difference("operations of layers", *classes)
    kept = [_keepers(profile, together=same_size) for profile in (one, other)]
    return [*found, *_first_difference("layers that keep activations", *kept)]


def _shapes(profile: Profile) -> list[tuple[int, ...]]:
    return [entry.shape for entry in profile.inputs]


def _has_classes(profile: Profile) -> bool:
    return all(entry.layer.cost_class for entry in profile.layers)


def _keepers(profile: Profile, *, together: bool) -> list[str]:
    """List the sets of layers that keep a storage together, or just the layers that keep any."""
    # At another batch size a library may copy where it shared before (a dimension of length 1 is
    # always contiguous), so that only the layers can be compared.
    sets = {entry.layers for entry in profile.storages if entry.size_bytes}
    if together:
        return [str(layers) for layers in sorted(sets)]
    return [f"layer {index}" for index in sorted({index for layers in sets for index in layers})]


def check_mergeable(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Check that profiles, named for the message, differ in nothing but the number of samples."""
    # Each is compared with the first, and with the first of its own size, where more must agree.
    first_of_shape: dict[tuple[tuple[int, ...], ...], int] = {}
    for index, profile in enumerate(profiles):
        alike = first_of_shape.setdefault(tuple(_shapes(profile)), index)
        for earlier in sorted({0, alike} - {index}):
            _check_pair(profiles[earlier], profile, (names[earlier], names[index]))


def check_distinct(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Check that no profile was given twice, which would count as two measurements."""
    first_of: dict[str, int] = {}
    for index, profile in enumerate(profiles):
        earlier = first_of.setdefault(profile.content_id(), index)
        if earlier != index:
            raise InvalidInput(
                f"{names[earlier]} and {names[index]} are the same profile "
                f"({profile.content_id()}); leave one out, or measure again"
            )


def _check_pair(one: Profile, other: Profile, names: tuple[str, str]) -> None:
    found = [*model_differences(one, other), *setting_differences(one, other)]
    found = found or forward_differences(one, other)
    if found:
        lines = "".join(
            f"\n  {what}: {truncate(before, 120)} and {truncate(after, 120)}"
            for what, before, after in found
        )
        raise InvalidInput(
            f"{names[0]} and {names[1]} cannot be merged: they differ in more than the "
            f"micro-batch size:{lines}"
        )


def _first_difference(what: str, one: Sequence[str], other: Sequence[str]) -> list[Difference]:
    """Return the first entries that differ, or the lengths; nothing if all entries are equal."""
    for position, (before, after) in enumerate(zip(one, other, strict=False)):
        if before != after:
            where = f"{before} (number {position} of {len(one)})"
            return [(what, where, f"{after} (of {len(other)})")]
    return [(what, str(len(one)), str(len(other)))] if len(one) != len(other) else []


def _text(value: object) -> str:
    return "none" if value in (None, "") else str(value)
