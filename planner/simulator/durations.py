"""The durations a pipeline step is simulated with, and its messages as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...core.plan.plan import DirectSend
from ...schedules.action_order import Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SkipTimes:
    """The transfer times of one skip connection, in seconds per micro-batch.

    Gradients travel back from ``target`` to ``source``; channels are those of `StageTimes`.
    """

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_channel: int = -1
    backward_channel: int = -1


@dataclass(frozen=True)
class StageTimes:
    """Durations of one micro-batch on one replica, in seconds; S stages. Not to be changed.

    Attributes:
        forward_s: Forward of each stage, S entries.
        backward_s: Backward of each stage, S entries; a forward that is computed again is in it.
        send_forward_s: From stage s to s + 1, S - 1 entries; empty if sending takes no time.
        send_backward_s: From stage s + 1 to s, S - 1 entries; empty if sending takes no time.
        tied_sync_s: Summing the gradients of tied weights, after everything else.
        saved_bytes: Activations a stage keeps per micro-batch from forward to backward; empty if
            not of interest. A stage that recomputes keeps its inputs.
        recomputed_bytes: Activations a stage has computed again, on top of the saved ones, while
            a backward is at work; empty if no stage recomputes.
        backward_input_s: Gradients of the inputs, where backwards are split; half of
            ``backward_s`` if empty.
        backward_weight_s: Gradients of the weights, with the same default.
        recompute_s: The part of each backward, or of its input part, that computes the forward
            again, where the schedule has separate actions (``R``) for it; nothing if empty.
        sync_s: Summing the gradients of a stage over its replicas, once all have done their last
            backward and beside the work of other stages; empty if it takes no time.
        forward_channel: The link of messages from stage s to s + 1, S - 1 entries: messages with
            one number share a link; -1 is a link private to the sending rank. Empty: all private.
        backward_channel: The link of messages from stage s + 1 to s, numbered alike.
        skips: Messages that bypass stages; stages still wait for their neighbours' results.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float] = ()
    send_backward_s: Sequence[float] = ()
    tied_sync_s: float = 0.0
    saved_bytes: Sequence[int] = ()
    recomputed_bytes: Sequence[int] = ()
    backward_input_s: Sequence[float] = ()
    backward_weight_s: Sequence[float] = ()
    recompute_s: Sequence[float] = ()
    sync_s: Sequence[float] = ()
    forward_channel: Sequence[int] = ()
    backward_channel: Sequence[int] = ()
    skips: Sequence[SkipTimes] = ()

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @cached_property
    def work_s(self) -> Floats:
        """Return the durations of F, B, I, W and R of every stage, kind by kind."""
        whole = np.asarray(self.backward_s, np.float64)
        first = second = whole / 2
        if len(self.backward_input_s):
            first = np.asarray(self.backward_input_s, np.float64)
            second = np.asarray(self.backward_weight_s, np.float64)
        again = np.zeros_like(whole)
        if len(self.recompute_s):
            again = np.asarray(self.recompute_s, np.float64)
        forward = np.asarray(self.forward_s, np.float64)
        return np.concatenate((forward, whole - again, first - again, second, again))

    @property
    def shares_channels(self) -> bool:
        """Return True if some messages share a link."""
        past = ((skip.forward_channel, skip.backward_channel) for skip in self.skips)
        numbers = chain(self.forward_channel, self.backward_channel, *past)
        return any(number >= 0 for number in numbers)

    def check(self, num_stages: int) -> None:
        """Raise `InvalidInput` unless there are durations for exactly this many stages."""
        boundaries = num_stages - 1
        for name, values, accepted in (
            ("forward_s", self.forward_s, (num_stages,)),
            ("backward_s", self.backward_s, (num_stages,)),
            ("send_forward_s", self.send_forward_s, (0, boundaries)),
            ("send_backward_s", self.send_backward_s, (0, boundaries)),
            ("saved_bytes", self.saved_bytes, (0, num_stages)),
            ("recomputed_bytes", self.recomputed_bytes, (0, num_stages)),
            ("backward_input_s", self.backward_input_s, (0, num_stages)),
            ("backward_weight_s", self.backward_weight_s, (0, num_stages)),
            ("recompute_s", self.recompute_s, (0, num_stages)),
            ("sync_s", self.sync_s, (0, num_stages)),
            ("forward_channel", self.forward_channel, (0, boundaries)),
            ("backward_channel", self.backward_channel, (0, boundaries)),
        ):
            if len(values) not in accepted:
                raise InvalidInput(f"{name} has {len(values)} entries for {num_stages} stages")
        if len(self.backward_input_s) != len(self.backward_weight_s):
            raise InvalidInput("backward_input_s and backward_weight_s come together or not at all")
        for skip in self.skips:
            if not 0 <= skip.source < skip.target - 1 < num_stages - 1:
                raise InvalidInput(
                    f"no message passes by a stage from {skip.source} to {skip.target} of "
                    f"{num_stages} stages"
                )


def skip_times(sends: Sequence[DirectSend]) -> tuple[SkipTimes, ...]:
    """Return a plan's direct sends as the simulator takes them."""
    return tuple(
        SkipTimes(
            send.source,
            send.target,
            send.forward_time_s,
            send.backward_time_s,
            send.forward_channel,
            send.backward_channel,
        )
        for send in sends
    )


class StepMessages(NamedTuple):
    """Messages sorted by direction (forward first), maker and distance to the reader.

    Attributes:
        maker: The stage that makes it.
        reader: The stage that reads it.
        send_s: How long it travels between ranks.
        channel: The shared channel it goes by, numbered from 0; ``num_channels`` plus the
            direction for one of the rank's own.
        first_made: Stage s makes messages ``first_made[d S + s]`` up to the next entry, in
            direction d, 0 forward and 1 backward. Entry 2 S is an empty range.
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
        if not times.skips and not times.shares_channels:
            sends = times.send_forward_s, times.send_backward_s
            nothing = [0.0] * (times.num_stages - 1)
            between = [one for each in sends for one in (each if len(each) else nothing)]
            return list_neighbours(times.num_stages)._replace(send_s=np.array(between, np.float64))
        return cls._build(times)

    @classmethod
    def _build(cls, times: StageTimes) -> StepMessages:
        stages = times.num_stages
        rows = sorted(_list_messages(times), key=lambda row: row[0])
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
            channel=np.where(
                channel >= 0, np.searchsorted(shared, channel), len(shared) + direction
            ),
            first_made=_firsts(direction * stages + maker, 2 * stages + 1),
            read=by_reader,
            first_read=_firsts((direction * stages + reader)[by_reader], 2 * stages + 1),
            num_channels=len(shared),
        )


@lru_cache(maxsize=256)
def list_neighbours(num_stages: int) -> StepMessages:
    """Return the messages of a pipeline without skip connections, which take no time yet."""
    nothing = [0.0] * num_stages
    return StepMessages._build(StageTimes(forward_s=nothing, backward_s=nothing))


Row = tuple[tuple[int, int, int], float, int]
"""Direction, maker and how many stages further it is read; duration; channel."""


def _list_messages(times: StageTimes) -> Iterator[Row]:
    forward = times.send_forward_s, times.forward_channel
    backward = times.send_backward_s, times.backward_channel
    for direction, (sends, channels) in enumerate((forward, backward)):
        for s in range(times.num_stages - 1):
            send_s, channel = sends[s] if len(sends) else 0.0, channels[s] if len(channels) else -1
            yield (direction, s + direction, 1), send_s, channel
    for skip in times.skips:
        distance = skip.target - skip.source
        yield (0, skip.source, distance), skip.forward_s, skip.forward_channel
        yield (1, skip.target, distance), skip.backward_s, skip.backward_channel


def _firsts(keys: Ints, count: int) -> Ints:
    """Return where each key 0 to ``count`` - 1 begins among sorted keys, and the end."""
    return np.searchsorted(keys, np.arange(count + 1)).astype(np.int64)
