"""Whether profiles are of one model on one kind of device with one set of settings."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput
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
"""Fields of the provenance that change what is measured, and their names for people."""

Difference = tuple[str, str, str]
"""What differs, and both values."""


def setting_differences(one: Profile, other: Profile) -> list[Difference]:
    """Settings, device and software in which two profiles differ."""
    found: list[Difference] = []
    kinds = [profile.provenance.device.partition(":")[0] for profile in (one, other)]
    if kinds[0] != kinds[1]:
        found.append(("kind of device", kinds[0], kinds[1]))
    for field, name in SETTINGS.items():
        before, after = getattr(one.provenance, field), getattr(other.provenance, field)
        if before != after:
            found.append((name, _text(before), _text(after)))
    if one.provenance.source == other.provenance.source == "measured":
        runs = ["none" if profile.reconciliation is None else "timed" for profile in (one, other)]
        if runs[0] != runs[1]:  # a graph without its code is measured on made-up weights and values
            found.append(("run of the whole model (a graph has none)", runs[0], runs[1]))
    return found


def model_differences(one: Profile, other: Profile) -> list[Difference]:
    """Ways in which two profiles are not of the same model cut into the same layers."""
    found: list[Difference] = []
    if one.model != other.model:
        found.append(("model", one.model, other.model))
    if one.spec != other.spec:
        found.append(("family or configuration", str(one.spec), str(other.spec)))
    names = [[entry.layer.name for entry in profile.layers] for profile in (one, other)]
    if names[0] != names[1]:
        found.append(("layers", *_first_apart(*names)))
    weights = [
        [(entry.names[0], entry.size_bytes) for entry in profile.parameters]
        for profile in (one, other)
    ]
    if weights[0] != weights[1]:
        found.append(("parameters", *_first_apart(*[list(map(str, each)) for each in weights])))
    frozen = [
        [f"{entry.names[0]} {'trained' if entry.trainable else 'frozen'}" for entry in each]
        for each in (one.parameters, other.parameters)
    ]
    if weights[0] == weights[1] and frozen[0] != frozen[1]:
        found.append(("trainable parameters", *_first_apart(*frozen)))
    inputs = [
        [(entry.name, entry.shape[1:], entry.dtype) for entry in profile.inputs]
        for profile in (one, other)
    ]
    if inputs[0] != inputs[1]:
        found.append(("inputs beside the samples", str(inputs[0]), str(inputs[1])))
    if (one.loss is None) != (other.loss is None):
        has = ["none" if entry.loss is None else "one" for entry in (one, other)]
        found.append(("loss", has[0], has[1]))
    return found


def forward_differences(one: Profile, other: Profile) -> list[Difference]:
    """Signs that two profiles of the same layers do not compute the same between them."""
    found: list[Difference] = []
    sent = [
        [
            f"after {boundary.after}: {tensor.name} of {len(tensor.shape)} dimensions"
            for boundary in profile.boundaries
            for tensor in boundary.tensors
        ]
        for profile in (one, other)
    ]
    if sent[0] != sent[1]:
        found.append(("tensors between layers", *_first_apart(*sent)))
    same_size = _shapes(one) == _shapes(other)
    if same_size:
        classes = [
            [f"{entry.layer.name} of class {entry.layer.cost_class}" for entry in profile.layers]
            for profile in (one, other)
        ]
        if _has_classes(one) and _has_classes(other) and classes[0] != classes[1]:
            found.append(("what layers do", *_first_apart(*classes)))
    kept = [_keepers(profile, together=same_size) for profile in (one, other)]
    if kept[0] != kept[1]:
        found.append(("layers that keep activations", *_first_apart(*kept)))
    return found


def _shapes(profile: Profile) -> list[tuple[int, ...]]:
    return [entry.shape for entry in profile.inputs]


def _has_classes(profile: Profile) -> bool:
    return all(entry.layer.cost_class for entry in profile.layers)


def _keepers(profile: Profile, *, together: bool) -> list[str]:
    """Sets of layers that keep a storage together, or just the layers that keep any.

    At another size a library may copy where it shared before (a dimension of one sample needs no
    copy to be contiguous), so that there only the layers can be compared.
    """
    sets = {entry.layers for entry in profile.storages if entry.size_bytes}
    if together:
        return [str(layers) for layers in sorted(sets)]
    return [f"layer {index}" for index in sorted({index for layers in sets for index in layers})]


def check_mergeable(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Insist that profiles differ in nothing but how many samples they are of.

    Args:
        profiles: At least one.
        names: Of each, for the message.

    Raises:
        InvalidInput: They differ otherwise; the message says in what.
    """
    first_of_shape: dict[tuple[tuple[int, ...], ...], int] = {}
    for index, profile in enumerate(profiles):
        alike = first_of_shape.setdefault(tuple(_shapes(profile)), index)
        for earlier in sorted({0, alike} - {index}):
            _check_pair(profiles[earlier], profile, (names[earlier], names[index]))


def check_distinct(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Insist that no profile was given twice: it would count as two measurements.

    Args:
        profiles: At least one.
        names: Of each, for the message.

    Raises:
        InvalidInput: Two are equal; the message says which.
    """
    first_of: dict[str, int] = {}
    for index, profile in enumerate(profiles):
        earlier = first_of.setdefault(profile.content_id(), index)
        if earlier != index:
            raise InvalidInput(
                f"{names[earlier]} and {names[index]} are one profile ({profile.content_id()}); "
                "a profile counts once: leave one out, or measure again"
            )


def _check_pair(one: Profile, other: Profile, names: tuple[str, str]) -> None:
    found = [*model_differences(one, other), *setting_differences(one, other)]
    found = found or forward_differences(one, other)
    if found:
        lines = "".join(
            f"\n  {what}: {_short(before)} and {_short(after)}" for what, before, after in found
        )
        raise InvalidInput(
            f"{names[0]} and {names[1]} cannot be merged, they differ in more than their "
            f"micro-batches:{lines}"
        )


def _first_apart(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """The first entries that differ, with how many there are."""
    for position, (before, after) in enumerate(zip(one, other, strict=False)):
        if before != after:
            return f"{before} (number {position} of {len(one)})", f"{after} (of {len(other)})"
    return f"{len(one)}", f"{len(other)}"


def _text(value: object) -> str:
    return "none" if value in (None, "") else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
