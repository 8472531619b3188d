"""Settings and results of `pipedream.py`, as in its tables and its JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel

Placement = Literal["as planned", "copies", "moved", "one level"]
"""Of PipeDream's stages on our cluster (see `price.py`)."""


@dataclass(frozen=True)
class Column:
    """A cluster: machines per level and the links between them, the lowest level first."""

    name: str
    machines: tuple[int, ...]
    bandwidths_bytes_per_s: tuple[float, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.machines)

    def one_level(self) -> Column:
        """All machines on the outermost links."""
        return Column("one level", (self.num_devices,), self.bandwidths_bytes_per_s[-1:])

    def one_machine(self) -> Column:
        """Return what one unit of the highest level is made of."""
        return Column("one machine", self.machines[:-1], self.bandwidths_bytes_per_s[:-1])

    def links(self, latency_s: float) -> tuple[LinkLevel, ...]:
        """Of every level, those with one machine too."""
        return tuple(
            LinkLevel(
                name=f"level {level + 1}",
                group_size=math.prod(self.machines[: level + 1]),
                latency_s=latency_s,
                bandwidth_bytes_per_s=bandwidth,
            )
            for level, bandwidth in enumerate(self.bandwidths_bytes_per_s)
        )

    def cluster(self, latency_s: float, memory_bytes: int | None) -> Cluster:
        """Return the cluster for our planner, without levels of one machine, which join nothing."""
        levels = zip(self.links(latency_s), self.machines, strict=True)
        return Cluster(
            devices=tuple(
                Device(name=f"device:{index}", memory_bytes=memory_bytes)
                for index in range(self.num_devices)
            ),
            levels=tuple(link for link, machines in levels if machines > 1),
        )


COLUMNS = (
    Column("n4", (4,), (1e9,)),
    Column("n16", (16,), (1e9,)),
    Column("[4,4]", (4, 4), (16e9, 1.25e9)),
    Column("[8,2]", (8, 2), (25e9, 3.125e9)),
)


@dataclass(frozen=True)
class Settings:
    """Settings of our own objectives, beyond PipeDream's.

    Attributes:
        microbatches: A step; `None` for `MICROBATCHES_A_DEVICE` times the devices.
        latency_s: Of every link.
        memory_bytes: Of every device; `None` for no limit.
        gap: The search may stop once it is proven this close, relatively, to the best.
    """

    microbatches: int | None = None
    latency_s: float = 0.0
    memory_bytes: int | None = None
    gap: float = 1e-4


@dataclass(frozen=True)
class PipeDreamsPlan:
    """The stages PipeDream's objective likes best, priced by our simulator.

    Attributes:
        time_s: Simulated step; `None` where they cannot be placed.
        stages: Layers and replicas.
        levels: What PipeDream was told of the cluster.
        placement: How its stages are placed.
        reason: Why those it finds for all levels cannot be placed, if they cannot.
    """

    time_s: float | None = None
    stages: tuple[dict[str, Any], ...] = ()
    levels: Column | None = None
    placement: Placement | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Own:
    """Results that only our own objectives have.

    Attributes:
        microbatches: A step.
        objective_s: The least found of what was minimised.
        objective_lower_bound_s: No plan has less.
        pipedream: What is compared with.
    """

    microbatches: int
    objective_s: float
    objective_lower_bound_s: float
    pipedream: PipeDreamsPlan


@dataclass(frozen=True)
class Result:
    """Result of an objective's solver for one profile on one cluster.

    Attributes:
        time_s: PipeDream's objective; for ours the simulated step.
        lower_bound_s: No split has a smaller ``time_s``.
        gap: How far what was minimised is, relatively, from its own lower bound.
        own: For our own objectives.
    """

    objective: str
    profile: str
    column: Column
    time_s: float
    lower_bound_s: float
    gap: float
    solve_s: float
    stages: tuple[dict[str, Any], ...]
    own: Own | None = None

    @property
    def gain(self) -> float | None:
        """0.1 where the step of PipeDream's plan takes 10 % longer than ours."""
        if self.own is None or self.own.pipedream.time_s is None or not self.time_s:
            return None
        return self.own.pipedream.time_s / self.time_s - 1

    def as_json(self) -> dict[str, Any]:
        document = {
            "objective": self.objective,
            "profile": self.profile,
            "machines": list(self.column.machines),
            "bandwidths_bytes_per_s": list(self.column.bandwidths_bytes_per_s),
            "time_s": self.time_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "solve_s": self.solve_s,
            "stages": list(self.stages),
        }
        if self.own is None:
            return document
        theirs = self.own.pipedream
        return {
            **document,
            "microbatches": self.own.microbatches,
            "objective_s": self.own.objective_s,
            "objective_lower_bound_s": self.own.objective_lower_bound_s,
            "gain": self.gain,
            "pipedream_time_s": theirs.time_s,
            "pipedream_stages": list(theirs.stages),
            "pipedream_levels": theirs.levels
            and {
                "machines": list(theirs.levels.machines),
                "bandwidths_bytes_per_s": list(theirs.levels.bandwidths_bytes_per_s),
                "placement": theirs.placement,
            },
            "pipedream_reason": theirs.reason,
        }
