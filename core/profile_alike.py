"""Whether profiles are of one model on one kind of device with one set of settings."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidInput
from .profile import Profile

SETTINGS = {
    "source": "measured or estimated",
    "device_name": "device",
    "torch_version": "torch",
    "num_threads": "CPU threads",
    "busy_neighbours": "busy neighbours",
    "autocast": "autocast",
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


def check_alike(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Insist that profiles differ in nothing but how many samples they are of.

    Args:
        profiles: At least one.
        names: Of each, for the message.

    Raises:
        InvalidInput: They differ otherwise; the message says in what.
    """
    first = profiles[0]
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        found = [*model_differences(first, profile), *setting_differences(first, profile)]
        if found:
            lines = "".join(
                f"\n  {what}: {_short(before)} and {_short(after)}" for what, before, after in found
            )
            raise InvalidInput(
                f"{names[0]} and {name} cannot be merged, they differ in more than their "
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
