"""Records of a link measurement: ranks, message times and fitted levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.document import Record


@dataclass(frozen=True)
class LinkOptions:
    """Options of a link measurement; without a device, CUDA is measured where there is any."""

    device: str | None = None
    budget_s: float = 20.0
    timeout_s: float = 60.0
    largest_bytes: int = 64 * 2**20


class RankDevice(Record):
    """One rank: where it runs and on what; `None` for what its launcher does not say.

    The memory is the GPU's, or the machine's for a CPU rank.
    """

    host: str
    group_rank: int | None = None
    local_rank: int = 0
    local_ranks: int | None = None
    device: str = "cpu"
    kind: str = "cpu"
    memory_bytes: int | None = None


class LinkTime(Record):
    """The median time of one size of message, or of one all-reduce, and the fastest run.

    A message goes one way, from the first of ``ranks`` to the second; the time of an all-reduce is
    that of its slowest rank.
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

    Errors are medians of abs(predicted - measured) / measured, for all-reduces over those of 1 MiB
    and more (which gradients are) unless there are only smaller ones; the worst is over all sizes.
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
