"""Assumptions of a plan about devices and links that were not measured, in words."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..cluster.accelerators import Accelerator, find_by_driver_name, get_accelerator
from ..cluster.cluster import Cluster, Device, LinkLevel
from ..cluster.shorthand import BETWEEN_NODES, INSIDE_NODE
from ..errors import InvalidInput
from ..profile.profile import Profile

_MEMORY = re.compile(r"\d+(\.\d+)?[KMGT]i?B", re.IGNORECASE)
"""Device kinds that shorthand names after their memory, such as ``24GB``: an unspecified GPU."""


class PostedSteps(NamedTuple):
    """Steps of pipelines that others posted, as multiples of what is predicted for them."""

    number: int
    least: float
    most: float


PIPELINES = PostedSteps(7, 0.9, 4.3)
"""Written by ``benchmarks/posted.py``; `docs/evidence/posted.md` shows every step."""


def describe_pipelines() -> str:
    """Describe how posted steps of pipelines compare with their predictions."""
    return f"posted pipelines took {PIPELINES.least:g} to {PIPELINES.most:g} times as long"


def note_pipelines(band: float) -> str:
    """Return the note of an estimated pipeline, where unsplit steps keep to an error band."""
    return (
        f"the error band of {band:.0%} is of unsplit steps; {PIPELINES.number} steps of pipelines "
        f"that others posted took {PIPELINES.least:g} to {PIPELINES.most:g} times as long as "
        "predicted, longest where a runtime blocks while it sends (docs/evidence/posted.md)"
    )


def list_assumptions(profile: Profile, cluster: Cluster) -> list[str]:
    """List what a plan of this profile for this cluster assumes, a sentence each."""
    # These sentences become notes of the plan, and so enter its id: do not reword them lightly.
    sends = any(boundary.forward_bytes for boundary in profile.boundaries)
    sums = any(entry.layer.parameter_bytes for entry in profile.layers)
    links = _links(cluster) if sends or sums else ()
    return [*cluster.assumptions, *_speeds(profile, cluster), *links]


def find_profiled_device(profile: Profile) -> Accelerator | None:
    """Return the catalogue's device that a profile is of; `None` if unknown or not listed."""
    provenance = profile.provenance
    if not (provenance.device_name or provenance.torch_version):
        return None  # written by hand, or converted from another tool's format
    if provenance.device.partition(":")[0] == "cpu":
        return get_accelerator("cpu")
    return find_by_driver_name(provenance.device_name)


def _speeds(profile: Profile, cluster: Cluster) -> list[str]:
    """List device kinds without a given speed that differ from the device profiled."""
    profiled = find_profiled_device(profile)
    if profiled is None:
        return []
    others = dict.fromkeys(
        device.kind
        for device in cluster.devices
        # 1 is the default, so any other speed was given and needs no assumption.
        if device.speed == 1 and _is_another(device, profiled)
    )
    if not others:
        return []
    provenance = profile.provenance
    name = provenance.device_name or profiled.full_name
    where = f"a CPU ({name})" if profiled.backend == "cpu" else name
    return [
        f"the profile was {provenance.source} for {where}, and {' and '.join(others)} devices are "
        "taken to be exactly as fast: profile on them, or estimate a published model for them by "
        "name, or say how much faster they are with 'speed' in a cluster file "
        "(docs/guides/clusters.md)"
    ]


def _is_another(device: Device, profiled: Accelerator) -> bool:
    """Return True if a device is known to have other peak rates than the one profiled."""
    found = _kind(device.kind)
    if found is None:
        return profiled.backend == "cpu" and _MEMORY.fullmatch(device.kind) is not None
    return found.flops_per_s != profiled.flops_per_s


def _kind(name: str) -> Accelerator | None:
    try:
        return get_accelerator(name)
    except InvalidInput:
        return find_by_driver_name(name)


def _links(cluster: Cluster) -> list[str]:
    if len(cluster.devices) < 2:
        return []
    notes = [
        f"all-reduces over {level.name} are expected to be off by up to {level.error_band:.0%}, as "
        "hosts differ: measure them with 'stagewright profile --links'"
        for level in cluster.levels
        if (level.error_band or 0.0) > WIDE_BAND
    ]
    assumed = [level for level in cluster.levels if _is_assumed(level)]
    if not assumed:
        return notes
    rates = " and ".join(
        f"{level.bandwidth_bytes_per_s / 1e9:g} GB/s {_WHERE.get(level.name, 'between devices')}"
        for level in assumed
    )
    return [
        *notes,
        f"links are assumed to carry {rates}: measure them with 'stagewright profile --links', or "
        "write them into a cluster file (docs/guides/clusters.md)",
    ]


WIDE_BAND = 0.3
"""Relative error of all-reduces from which on a note tells it."""

_WHERE = {INSIDE_NODE.name: "inside a node", BETWEEN_NODES.name: "between nodes"}


def _is_assumed(level: LinkLevel) -> bool:
    """Return True if a link has exactly the figures of a default."""
    return any(
        # A document does not record whether its figures were measured; those that equal a
        # default exactly are taken to be one.
        (level.latency_s, level.bandwidth_bytes_per_s)
        == (default.latency_s, default.bandwidth_bytes_per_s)
        for default in (LinkLevel(group_size=1), INSIDE_NODE, BETWEEN_NODES)
    )
