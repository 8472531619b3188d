"""The messages of one micro-batch as arrays, indexed by maker and by reader."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ...schedules.action_order import Ints
from .durations import StageTimes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepMessages:
    """Messages sorted by direction (forward first), maker and distance to the reader.

    Attributes:
        maker: The stage that makes it.
        reader: The stage that reads it.
        send_s: How long it travels between ranks.
        channel: The shared channel it goes by, numbered from 0; -1 for one of the rank's own.
        first_made: Stage s makes messages ``first_made[d S + s]`` up to the next entry, in
            direction d, 0 forward and 1 backward.
        read: Messages by direction and the stage that reads them, the nearest maker first.
        first_read: Stage s reads those at ``first_read[d S + s]`` up to the next entry.
        num_channels: Shared ones.
    """

    maker: Ints
    reader: Ints
    send_s: Floats
    channel: Ints
    first_made: Ints
    read: Ints
    first_read: Ints
    num_channels: int

    @classmethod
    def of(cls, times: StageTimes) -> StepMessages:
        """Build the messages between neighbours and along skip connections."""
        stages = times.num_stages
        rows = sorted(chain(_forward(times), _backward(times)), key=lambda row: row[0])
        columns = np.array([row[0] for row in rows], np.int64).reshape(-1, 3).T
        direction, maker, distance = columns.copy()
        reader = maker + np.where(direction == 0, distance, -distance)
        channel = np.array([row[2] for row in rows], np.int64)
        shared = np.unique(channel[channel >= 0])
        by_reader = np.lexsort((distance, reader, direction))
        return cls(
            maker=maker,
            reader=reader,
            send_s=np.array([row[1] for row in rows], np.float64),
            channel=np.where(channel >= 0, np.searchsorted(shared, channel), -1),
            first_made=_firsts(direction * stages + maker, 2 * stages),
            read=by_reader,
            first_read=_firsts((direction * stages + reader)[by_reader], 2 * stages),
            num_channels=len(shared),
        )


Row = tuple[tuple[int, int, int], float, int]
"""Direction, maker and how many stages further it is read; duration; channel."""


def _forward(times: StageTimes) -> list[Row]:
    boundaries = range(times.num_stages - 1)
    sends, channels = times.send_forward_s, times.forward_channel
    return [
        ((0, s, 1), sends[s] if len(sends) else 0.0, channels[s] if len(channels) else -1)
        for s in boundaries
    ] + [
        ((0, skip.source, skip.target - skip.source), skip.forward_s, skip.forward_channel)
        for skip in times.skips
    ]


def _backward(times: StageTimes) -> list[Row]:
    boundaries = range(times.num_stages - 1)
    sends, channels = times.send_backward_s, times.backward_channel
    return [
        ((1, s + 1, 1), sends[s] if len(sends) else 0.0, channels[s] if len(channels) else -1)
        for s in boundaries
    ] + [
        ((1, skip.target, skip.target - skip.source), skip.backward_s, skip.backward_channel)
        for skip in times.skips
    ]


def _firsts(keys: Ints, count: int) -> Ints:
    """Return where each key 0 to ``count`` - 1 begins among sorted keys, and the end."""
    return np.searchsorted(keys, np.arange(count + 1)).astype(np.int64)
