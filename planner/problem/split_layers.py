"""Costs of layers that are split over several devices, and devices in groups that split them.

A group of devices that splits layers between them (tensor parallelism) is planned as one device
with the memory of each: `split_costs` puts its collectives into the times of the layers, and
`group_devices` makes a cluster of the groups. `docs/concepts/planner.md` has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.cluster.places import list_groups
from ...core.errors import InvalidInput
from ...core.graph.graph import Boundary, Parameter
from ...core.graph.tensors import TensorSpec
from ...core.profile.profile import LayerProfile, Profile, SplitLayer, TensorSplit, Timing
from ...core.units import list_some

MOST_NAMED = 3
"""Layers that are not split and named in a note."""

MOSTLY_SPLIT = 1.1
"""Times its fair share of a layer's work that a device may do without a note."""

LOSS_PER_DOUBLING = 0.025
"""Time that products lose relatively when their share halves: large ones in bf16 on an A100 take
1.5, 5 and 8 % longer in the median when cut in 2, 4 and 8 (aiconfigurator's measurements)."""


def find_split(profile: Profile, degree: int) -> TensorSplit:
    """Return how layers split over so many devices.

    Raises:
        InvalidInput: The profile does not know, or nothing can be split.
    """
    for split in profile.splits:
        if split.degree == degree:
            return split
    degrees = ", ".join(str(split.degree) for split in profile.splits)
    remedy = (
        "'stagewright profile' and 'stagewright estimate' find out from the model's code, name or "
        "graph file: make it again, or leave tensor at 1; where they name no number either, "
        "nothing in the model can be split"
    )
    raise InvalidInput(
        f"the profile does not say how layers split over tensor={degree} devices"
        + (f"; it knows {degrees}" if degrees else f"; {remedy}"),
        field="/options/tensor",
    )


def describe_split(profile: Profile, degree: int) -> Iterator[str]:
    """Yield notes on layers that devices do whole, or mostly."""
    timed = [
        (entry.layer.name, own)
        for entry, own in zip(profile.layers, find_split(profile, degree).layers, strict=True)
        if entry.forward.median_s + entry.backward.median_s > 0
    ]
    total = len(profile.layers)
    if whole := [
        f"{name} ({own.reasons[0] if own.reasons else 'it has no product to divide'})"
        for name, own in timed
        if own.compute_share == 1
    ]:
        yield (
            f"{len(whole)} of {total} layers are not split, and done by every device of a group: "
            + list_some(whole, MOST_NAMED)
        )
    if partial := [
        f"{name} ({own.compute_share:.2f}: "
        + (own.reasons[0] if own.reasons else "what is around its products is not split")
        + ")"
        for name, own in timed
        if MOSTLY_SPLIT / degree < own.compute_share < 1
    ]:
        yield (
            f"{len(partial)} of {total} layers are split in part, and each device does more than "
            f"{1 / degree:.2g} of their work: {list_some(partial, MOST_NAMED)}"
        )


def split_costs(profile: Profile, split: TensorSplit, cluster: Cluster) -> Profile:
    """Return the profile as one of the devices that split its layers works on it.

    Times include the collectives of the group, in seconds of the device profiled.
    """
    link, speed = cluster.levels[0], cluster.devices[0].speed
    pairs = list(zip(profile.layers, split.layers, strict=True))
    kept = [
        _ratio(own.saved_activation_bytes, entry.saved_activation_bytes) for entry, own in pairs
    ]
    held = [_ratio(own.parameter_bytes, entry.layer.parameter_bytes) for entry, own in pairs]
    return profile.model_copy(
        update={
            "layers": tuple(_split_layer(*pair, split.degree, link, speed) for pair in pairs),
            "boundaries": tuple(_split_boundary(entry, split) for entry in profile.boundaries),
            "edges": tuple(
                edge.model_copy(update={"tensor": _split_tensor(edge.tensor, split)})
                for edge in profile.edges
            ),
            "parameters": tuple(_scale_parameter(entry, held) for entry in profile.parameters),
            "storages": tuple(
                entry.model_copy(
                    update={"size_bytes": _scale(entry.size_bytes, entry.layers, kept)}
                )
                for entry in profile.storages
            ),
            "splits": (),
        }
    )


def _split_boundary(boundary: Boundary, split: TensorSplit) -> Boundary:
    """Return a boundary of which each device sends what it holds to its counterpart."""
    tensors = tuple(_split_tensor(tensor, split) for tensor in boundary.tensors)
    return boundary.model_copy(update={"tensors": tensors})


def _split_tensor(tensor: TensorSpec, split: TensorSplit) -> TensorSpec:
    if tensor.name not in split.divided:
        return tensor
    return tensor.model_copy(update={"parts": split.degree})


def _split_layer(
    entry: LayerProfile, own: SplitLayer, degree: int, link: LinkLevel, speed: float
) -> LayerProfile:
    share = own.compute_share
    if share < 1:
        share = min(1.0, share * (1 + LOSS_PER_DOUBLING * math.log2(degree)))
    forward_s, backward_s = collectives_s(own, degree, link)
    layer = entry.layer.model_copy(update={"parameter_bytes": own.parameter_bytes})
    inputs, weights = entry.backward_input, entry.backward_weight
    return entry.model_copy(
        update={
            "layer": layer,
            "forward": _add(entry.forward, share, forward_s * speed),
            "backward": _add(entry.backward, share, backward_s * speed),
            "backward_input": inputs and _add(inputs, share, backward_s * speed),
            "backward_weight": weights and _add(weights, share, 0.0),
            "saved_activation_bytes": own.saved_activation_bytes,
            "workspace_bytes": own.workspace_bytes,
        }
    )


def collectives_s(own: SplitLayer, degree: int, link: LinkLevel) -> tuple[float, float]:
    """Return the time of a layer's collectives in a forward and in a backward.

    An all-gather or a reduce-scatter takes half as long as an all-reduce: it sends half as much.
    No work is done meanwhile.
    """
    gathered = own.forward_gathered_bytes, own.backward_gathered_bytes
    both = sum(size > 0 for size in gathered)
    found = []
    for reduced, reductions, size in (
        (own.forward_reduced_bytes, own.forward_reductions, gathered[0]),
        (own.backward_reduced_bytes, own.backward_reductions, gathered[1]),
    ):
        gathers = own.gathers / both if size else 0.0
        time_s = _collective_s(link, reduced, reductions, degree)
        found.append(time_s + _collective_s(link, size, gathers, degree) / 2)
    return found[0], found[1]


def _collective_s(link: LinkLevel, size_bytes: int, number: float, degree: int) -> float:
    number = number or 1.0  # bytes without a number of collectives are sent by one
    return number * link.all_reduce_time_s(size_bytes / number, degree)


def _add(timing: Timing, share: float, more_s: float) -> Timing:
    time_s = timing.median_s * share + more_s
    return timing.model_copy(update={"median_s": time_s, "spread_s": timing.spread_s * share})


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _scale(size: int, layers: Sequence[int], ratios: Sequence[float]) -> int:
    """Return the bytes that one device has of what several layers may use: the most of any."""
    return math.ceil(size * max((ratios[layer] for layer in layers), default=1.0))


def _scale_parameter(entry: Parameter, ratios: Sequence[float]) -> Parameter:
    """Return what one device has of a parameter: a whole number of elements, of the same type."""
    if not entry.numel:
        size = _scale(entry.size_bytes, entry.layers, ratios)
        return entry.model_copy(update={"size_bytes": size})
    numel = _scale(entry.numel, entry.layers, ratios)
    size = -(-entry.size_bytes * numel // entry.numel)
    return entry.model_copy(update={"size_bytes": size, "numel": numel})


def group_devices(cluster: Cluster, degree: int) -> tuple[Cluster, dict[str, tuple[str, ...]]]:
    """Return a cluster of groups of so many devices, and each group's devices by its name.

    A group is consecutive equal devices that the innermost level joins; what is left of a node
    over stays idle. A group's messages to others go from each of its devices to its counterpart,
    which takes as long as one message, but over a shared connection, where they queue.

    Raises:
        InvalidInput: Devices are of several speeds, no level joins so many, or pairs of groups have
            links of their own.
    """
    if cluster.links:
        raise InvalidInput(
            f"tensor={degree} knows links by level only, and the cluster has links between pairs "
            f"of groups ({cluster.links[0]}); plan with tensor=1, or leave out the 'links'",
            field="/options/tensor",
        )
    speeds = sorted({device.speed for device in cluster.devices})
    if len(speeds) > 1:
        raise InvalidInput(
            f"tensor={degree} needs devices of one speed, and these have {speeds}; plan with "
            "tensor=1, or on the devices of one kind",
            field="/options/tensor",
        )
    groups = _list_device_groups(cluster, degree)
    if not groups:
        raise InvalidInput(
            f"tensor={degree} needs {degree} equal devices that the innermost link level joins, "
            "and there are none; describe the nodes, such as 4x8x80GB, or use a smaller number",
            field="/options/tensor",
        )
    members = {
        cluster.devices[run[0]].name: tuple(cluster.devices[i].name for i in run) for run in groups
    }
    heads = {run[0] for run in groups}
    folded = cluster.without(*(i for i in range(len(cluster.devices)) if i not in heads))
    levels = [
        link.scale(bandwidth_factor=1 / degree) if link.shared and level else link
        for level, link in enumerate(folded.levels)
    ]
    # A level whose groups hold one group of devices each joins nothing any more.
    numbers = list_groups(folded)
    while len(levels) > 1 and len(set(numbers[0])) == len(folded.devices):
        levels, numbers = levels[1:], numbers[1:]
    names = {link.name for link in levels[:-1] if link.group_size is None}
    devices = tuple(
        device.model_copy(
            update={"place": {name: at for name, at in device.place.items() if name in names}}
        )
        for device in folded.devices
    )
    return Cluster(devices=devices, levels=tuple(levels)), members


def _list_device_groups(cluster: Cluster, degree: int) -> list[tuple[int, ...]]:
    """Return the devices of every group, as indices."""
    if not cluster.levels:
        return []
    numbers = list_groups(cluster)[0]

    def key(index: int) -> tuple[int, str, int | None]:
        device = cluster.devices[index]
        return numbers[index], device.kind, device.memory_bytes

    runs = [list(run) for _, run in groupby(range(len(cluster.devices)), key=key)]
    return [
        tuple(run[at : at + degree])
        for run in runs
        for at in range(0, len(run) - degree + 1, degree)
    ]
