"""Communication between stages: bytes, links and transfer times."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.cluster.cluster import LinkLevel
from ...core.plan.plan import DirectSend
from .assignment import Assignment
from .device_classes import Devices
from .skip_connections import SkipConnection

Sent = tuple[int, int, float, float]
"""Bytes there and back, and how long they travel."""

NOTHING: Sent = (0, 0, 0.0, 0.0)


class StageLinks:
    """The link levels and transfers between the stages of a plan.

    Args:
        devices: Those.
        only_forward: Whether no gradients come back.
    """

    def __init__(self, devices: Devices, *, only_forward: bool) -> None:
        self.devices, self.only_forward = devices, only_forward
        self.shares = any(level.shared for level in devices.levels)

    def between(self, assignment: Assignment, stage: int, other: int) -> tuple[int, LinkLevel]:
        """Return the index and the link level that join a stage and a later one."""
        one, two = assignment.classes[stage], assignment.classes[other]
        if one != two:
            level = self.devices.level_between(one, two)
        else:
            first = assignment.ends[stage] - 1
            second = assignment.ends[other] - assignment.replicas[other]
            level = self.devices.classes[one].level_of(first, second)
        return level, self.devices.levels[level]

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
        inner = self.devices.levels[level - 1].group_size if level else 1
        cluster = len(self.devices.cluster.devices)
        found = []
        for sender in (source, target):
            indices = assignment.device_indices(self.devices, sender)
            groups = {index // inner for index in indices}
            own = not link.shared or len(groups) > 1
            found.append(-1 if own else level * cluster + groups.pop())
        return found[0], found[1]
