"""Records of a link measurement: ranks, message times and fitted levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.document import Record


@dataclass(frozen=True)
class LinkOptions:
    """Options of a link measurement.

    Attributes:
        device: ``cpu`` or ``cuda``; `None` for CUDA where there is any.
        budget_s: Seconds to spend, about.
        timeout_s: How long a rank waits for another before it gives up.
        largest_bytes: Of a message.
    """

    device: str | None = None
    budget_s: float = 20.0
    timeout_s: float = 60.0
    largest_bytes: int = 64 * 2**20


class RankDevice(Record):
    """One rank: where it runs and on what.

    Attributes:
        host: The machine's name.
        group_rank: The launcher's number of the machine; `None` if it gave none.
        local_rank: The rank's number on its machine.
        local_ranks: Ranks on its machine, as the launcher says; `None` if it does not.
        device: ``cpu`` or ``cuda:N``.
        kind: ``cpu``, or the GPU's name.
        memory_bytes: Of the GPU; of the machine for a CPU rank.
    """

    host: str
    group_rank: int | None = None
    local_rank: int = 0
    local_ranks: int | None = None
    device: str = "cpu"
    kind: str = "cpu"
    memory_bytes: int | None = None


class LinkTime(Record):
    """The median time of one size of message, or of one all-reduce.

    Attributes:
        what: ``message`` from the first of ``ranks`` to the second, or ``all_reduce`` of all.
        ranks: Who took part.
        size_bytes: Of the message; on every rank of an all-reduce.
        time_s: One way; of an all-reduce the slowest rank's.
        least_s: The fastest run.
        repeats: Runs the median is of.
    """

    what: Literal["message", "all_reduce"]
    ranks: tuple[int, ...] = Field(min_length=2)
    size_bytes: int = Field(ge=1)
    time_s: float = Field(ge=0)
    least_s: float = Field(0.0, ge=0)
    repeats: int = Field(1, ge=1)


class LevelTimes(Record):
    """Everything measured at one level.

    Attributes:
        times: Messages and all-reduces of ranks that meet here.
        slowdown: How many times longer a message takes when every rank of one inner group sends
            one at once; `None` where no two ranks share an inner group.
    """

    name: str
    group_size: int = Field(ge=1)
    times: tuple[LinkTime, ...]
    slowdown: float | None = None


class LevelFit(Record):
    """A level of the cluster and how well it predicts what it was fitted to.

    Attributes:
        level: As in the cluster.
        message_error: Median of abs(predicted - measured) / measured over messages.
        all_reduce_error: The same over all-reduces of 1 MiB and more, which gradients are; smaller
            ones only where there is no other.
        worst_error: The largest of all, whatever the size.
        measured: What it was fitted to.
    """

    level: LinkLevel
    message_error: float
    all_reduce_error: float | None
    worst_error: float
    measured: LevelTimes


class LinkReport(Record):
    """A measured cluster with the fit of each of its levels, innermost first."""

    cluster: Cluster
    backend: str
    levels: tuple[LevelFit, ...] = ()
    notes: tuple[str, ...] = ()
