"""Communication between stages: what crosses a cut, what bypasses stages, and how long it takes.

A skip connection is a value that later stages read, sent directly instead of relayed. It goes from
each stage that makes or reads it to the next one that reads it, so no stage sends it twice and none
holds it in vain; `runtime.partition.routes` sends it so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.cluster.cluster import LinkLevel
from ...core.graph.graph import MODEL_INPUT
from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import DirectSend
from ...core.profile.profile import Profile
from .assignment import Assignment
from .device_classes import Devices

Sent = tuple[int, int, float, float]
"""Bytes there and back, and how long they travel."""

NOTHING: Sent = (0, 0, 0.0, 0.0)


@dataclass(frozen=True)
class SkipValue:
    """A tensor that is read beyond the layer after the one that makes it.

    Attributes:
        name: Its name at every boundary.
        layers: Those that make and read it, ascending; the first makes the model's own inputs, the
            last reads what the model returns.
        forward_bytes: Its size.
        backward_bytes: That of its gradient, if it has one.
    """

    name: str
    layers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class SkipConnection:
    """The values one stage sends directly to a later, non-adjacent stage, per micro-batch."""

    source: int
    target: int
    values: tuple[SkipValue, ...]

    @property
    def forward_bytes(self) -> int:
        return sum(value.forward_bytes for value in self.values)

    @property
    def backward_bytes(self) -> int:
        return sum(value.backward_bytes for value in self.values)


def find_skip_values(profile: Profile) -> tuple[SkipValue, ...] | None:
    """Return the values that could bypass a stage; None if their readers are unknown."""
    tensors, layers = _uses(profile)
    if not _accounts_for_boundaries(profile, layers):
        return None
    return tuple(
        SkipValue(
            name,
            tuple(sorted(used)),
            tensors[name].size_bytes,
            tensors[name].size_bytes * tensors[name].requires_grad,
        )
        for name, used in layers.items()
        if max(used) - min(used) > 1
    )


def find_skips(values: Iterable[SkipValue], cuts: Sequence[int]) -> tuple[SkipConnection, ...]:
    """Return the skip connections between stages with these cuts, sorted by source and target."""
    found: dict[tuple[int, int], list[SkipValue]] = {}
    for value in values:
        stages = dict.fromkeys(bisect_right(cuts, layer) - 1 for layer in value.layers)
        for source, target in pairwise(stages):
            if target > source + 1:
                found.setdefault((source, target), []).append(value)
    return tuple(SkipConnection(*pair, tuple(found[pair])) for pair in sorted(found))


def bytes_over_cut(skips: Iterable[SkipConnection], stage: int) -> tuple[int, int]:
    """Return the bytes there and back that cross a stage's outgoing cut but are sent directly."""
    return _summed(skip for skip in skips if skip.source <= stage < skip.target)


def bytes_past_stage(skips: Iterable[SkipConnection], stage: int) -> tuple[int, int]:
    """Return the bytes there and back that a stage would hold only to relay them."""
    return _summed(skip for skip in skips if skip.source < stage < skip.target)


def _summed(skips: Iterable[SkipConnection]) -> tuple[int, int]:
    chosen = tuple(skips)
    return sum(one.forward_bytes for one in chosen), sum(one.backward_bytes for one in chosen)


def _uses(profile: Profile) -> tuple[dict[str, TensorSpec], dict[str, set[int]]]:
    """Return, by name, the tensors that cross boundaries and the layers that make or read them."""
    tensors = {spec.name: spec for gap in profile.boundaries for spec in gap.tensors}
    layers: dict[str, set[int]] = {name: set() for name in tensors}
    for edge in profile.edges:
        if edge.tensor.name in layers:
            source = 0 if edge.source == MODEL_INPUT else edge.source
            layers[edge.tensor.name] |= {source, edge.target}
    last = len(profile.layers) - 1
    for gap in profile.boundaries:
        for name in (spec.name for spec in gap.tensors):
            if not layers[name]:
                layers[name].add(gap.after)
            if max(layers[name]) <= gap.after:  # read by no layer behind: the model returns it
                layers[name].add(last)
    return tensors, layers


def _accounts_for_boundaries(profile: Profile, layers: dict[str, set[int]]) -> bool:
    """Return True if the edges explain the tensors at every legal boundary."""
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name, used in layers.items():
        begins.setdefault(min(used), []).append(name)
        ends.setdefault(max(used), []).append(name)
    live: set[str] = set()
    for gap in profile.boundaries:
        live.update(begins.get(gap.after, ()))
        live.difference_update(ends.get(gap.after, ()))
        if gap.legal and live != {spec.name for spec in gap.tensors}:
            return False
    return bool(profile.edges)


class StageLinks:
    """The link levels and transfers between the stages of a plan."""

    def __init__(self, devices: Devices, *, only_forward: bool) -> None:
        self.devices, self.only_forward = devices, only_forward
        self.shares = any(level.shared for level in devices.levels)

    def between(self, assignment: Assignment, stage: int, other: int) -> tuple[int, LinkLevel]:
        """Return the index and the link level that join a stage and a later one."""
        one, two = assignment.classes[stage], assignment.classes[other]
        first = assignment.ends[stage] - 1
        second = assignment.ends[other] - assignment.replicas[other]
        classes = self.devices.classes
        if one != two:
            level = self.devices.level_between(one, two)
        else:
            level = classes[one].level_of(first, second)
        if not self.devices.pair_links:
            return level, self.devices.levels[level]
        pair = classes[one].devices[first], classes[two].devices[second]
        return level, self.devices.link_of(level, *pair)

    def sent(
        self, assignment: Assignment, source: int, target: int, there_bytes: int, back_bytes: int
    ) -> Sent:
        """Return the traffic between two stages; none if they share a device."""
        same = assignment.chunks > 1 and (
            assignment.device_indices(self.devices, source)
            == assignment.device_indices(self.devices, target)
        )
        if same:
            return NOTHING
        _, link = self.between(assignment, source, target)
        back_s = 0.0 if self.only_forward else link.transfer_time_s(back_bytes)
        return there_bytes, back_bytes, link.transfer_time_s(there_bytes), back_s

    def direct(
        self, assignment: Assignment, skips: Iterable[SkipConnection]
    ) -> tuple[DirectSend, ...]:
        """Return the direct sends that carry these skip connections."""
        found = []
        for skip in skips:
            pair = skip.source, skip.target
            there_bytes, back_bytes, there_s, back_s = self.sent(
                assignment, *pair, skip.forward_bytes, skip.backward_bytes
            )
            there_channel, back_channel = self._channels(assignment, *pair)
            found.append(
                DirectSend(
                    source=skip.source,
                    target=skip.target,
                    tensors=tuple(value.name for value in skip.values),
                    forward_bytes=there_bytes,
                    backward_bytes=0 if self.only_forward else back_bytes,
                    forward_time_s=there_s,
                    backward_time_s=back_s,
                    forward_channel=there_channel,
                    backward_channel=back_channel,
                )
            )
        return tuple(found)

    def channels(self, assignment: Assignment) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return each boundary's shared channel per direction; -1 for a private one.

        A group of devices has one connection at a shared level, used by all messages that leave
        it there; stages spread over several groups are taken to have enough of their own.
        """
        if not self.shares:
            return (), ()
        found = [
            self._channels(assignment, stage, stage + 1)
            for stage in range(assignment.num_stages - 1)
        ]
        return tuple(there for there, _ in found), tuple(back for _, back in found)

    def _channels(self, assignment: Assignment, source: int, target: int) -> tuple[int, int]:
        """Return the channels of a stage's messages to a later stage and back."""
        if not self.shares:
            return -1, -1
        level, link = self.between(assignment, source, target)
        cluster = len(self.devices.cluster.devices)
        found = []
        for sender in (source, target):
            indices = assignment.device_indices(self.devices, sender)
            inner = self.devices.groups[level - 1] if level else range(cluster)
            groups = {inner[index] for index in indices}
            own = not link.shared or len(groups) > 1
            found.append(-1 if own else level * cluster + groups.pop())
        return found[0], found[1]
