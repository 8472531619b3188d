"""Link measurement session: every rank goes through the same steps in the same order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput
from ...core.progress import Progress
from .fit import fit_levels
from .levels import (
    Pair,
    RankLevel,
    describe_devices,
    find_levels,
    host_size,
    list_probes,
    number_hosts,
    remarks,
    scatter,
)
from .rank_group import RankGroup
from .records import LevelTimes, LinkReport, LinkTime, RankDevice
from .timing import sizes_up_to, time_all_reduces, time_messages

PROBE_BYTES = 2**20
"""Size of the messages that tell levels apart."""

PROBING_SHARE = 0.2
"""Share of the budget spent on probing."""

CROWD_BYTES = 4 * 2**20
MOST_CROWDED = 8
"""Pairs that send at once when a shared level is looked for."""


@dataclass
class LinkSession:
    """This rank's part of a measurement."""

    group: RankGroup
    progress: Progress | None = None
    _mine: list[LinkTime] = field(default_factory=list)
    _done: int = 0
    _total: int = 0

    def report(self) -> LinkReport:
        """Return the measured cluster, equal on every rank."""
        ranks = self._gather_devices()
        size, remark = host_size(number_hosts(ranks))
        levels = self._levels(len(ranks), size)
        steps = [list_steps(levels, index, len(ranks)) for index in range(len(levels))]
        self._total += sum(map(len, steps))
        share_s = self._share_s(1 - PROBING_SHARE, sum(map(len, steps)))
        found = [
            self._level(level, of_level, share_s)
            for level, of_level in zip(levels, steps, strict=True)
        ]
        devices = describe_devices(ranks)
        bare = Cluster.uniform(len(ranks)).model_copy(update={"devices": devices})
        fits = fit_levels(found, bare)
        return LinkReport(
            cluster=Cluster(devices=devices, levels=tuple(fit.level for fit in fits)),
            backend=self.group.backend,
            levels=fits,
            notes=tuple(filter(None, (remark, *remarks(devices), scatter(found)))),
        )

    def _gather_devices(self) -> list[RankDevice]:
        """Return all ranks, once they agree on the options."""
        mine = {"options": repr(self.group.options), "device": self.group.describe().model_dump()}
        told = [
            json.loads(text) for text in self.group.gather(json.dumps(mine), "to say what it is")
        ]
        options = {entry["options"] for entry in told}
        if len(options) > 1:
            raise InvalidInput(
                f"the ranks measure with different options: {' and '.join(sorted(options))}; "
                "start all with the same"
            )
        ranks = [RankDevice.model_validate(entry["device"]) for entry in told]
        if len({rank.device.partition(":")[0] for rank in ranks}) > 1:
            raise InvalidInput(
                "some ranks have a CUDA device and others none; start ranks only where there are "
                "devices, or measure with --device cpu"
            )
        return ranks

    def _share_s(self, share: float, steps: int) -> float:
        """Return the time for one of some steps, at most half the timeout of waiting ranks."""
        options = self.group.options
        return min(options.budget_s * share / max(steps, 1), options.timeout_s / 2)

    def _levels(self, num_ranks: int, size: int) -> list[RankLevel]:
        """Find levels by hosts and by the times of messages of one size."""
        pairs = list_probes(num_ranks, size)
        self._total += len(pairs)
        share_s = self._share_s(PROBING_SHARE, len(pairs))
        probe = min(PROBE_BYTES, self.group.options.largest_bytes)
        for pair in pairs:
            self._messages(pair, [probe], share_s)
        times = {(one.ranks[0], one.ranks[1]): one.time_s for one in self._collect()}
        return find_levels(num_ranks, size, times)

    def _level(self, level: RankLevel, steps: Sequence[LinkStep], share_s: float) -> LevelTimes:
        sizes = sizes_up_to(self.group.options.largest_bytes)
        for step in steps:
            if step.what == "message":
                self._messages((step.ranks[0], step.ranks[1]), sizes, share_s)
            elif step.what == "all_reduce":
                self._all_reduces(step.ranks, sizes, share_s)
        times = self._collect()
        crowds = [step.ranks for step in steps if step.what == "crowd"]
        slowdown = self._slowdown(crowds[0], share_s) if crowds else None
        return LevelTimes(
            name=level.name, group_size=level.group_size, times=times, slowdown=slowdown
        )

    def _messages(self, pair: Pair, sizes: Sequence[int], budget_s: float) -> None:
        source, target = pair
        self._begin(f"messages from rank {source} to rank {target}")
        if self.group.rank in pair:
            self._mine += time_messages(self.group, *pair, sizes, budget_s)
        self.group.wait_for_all(pair, f"to time messages from rank {source} to rank {target}")

    def _all_reduces(self, ranks: tuple[int, ...], sizes: Sequence[int], budget_s: float) -> None:
        self._begin(f"sums over {len(ranks)} ranks")
        self.group.subgroup(ranks)  # a collective call: also by ranks outside the group
        if self.group.rank in ranks:
            self._mine += time_all_reduces(self.group, ranks, sizes, budget_s)
        self.group.wait_for_all(ranks, f"to time sums over {len(ranks)} ranks")

    def _slowdown(self, crowd: tuple[int, ...], budget_s: float) -> float:
        """Measure how many times longer messages take when all ranks of a group send at once."""
        self._begin(f"messages of {len(crowd) // 2} pairs at once")
        half = len(crowd) // 2
        pairs = list(zip(crowd[:half], crowd[half:], strict=True))
        size = [min(CROWD_BYTES, self.group.options.largest_bytes)]
        # Alone and together back to back, so that a change of the network's load hits both.
        alone = self._at_once(pairs[:1], size, budget_s / 2)
        together = self._at_once(pairs, size, budget_s / 2)
        return mean(together) / mean(alone) if alone and together else 1.0

    def _at_once(self, pairs: Sequence[Pair], sizes: Sequence[int], budget_s: float) -> list[float]:
        self.group.wait_for_all(range(self.group.size), "to send at once")
        for pair in pairs:
            if self.group.rank in pair:
                self._mine += time_messages(self.group, *pair, sizes, budget_s)
        return [entry.time_s for entry in self._collect()]

    def _collect(self) -> tuple[LinkTime, ...]:
        """Collect all ranks' new measurements; of an all-reduce, the slowest rank's."""
        mine = json.dumps([entry.model_dump() for entry in self._mine])
        self._mine = []
        found: dict[tuple[object, ...], LinkTime] = {}
        for text in self.group.gather(mine, "to say what it measured"):
            for data in json.loads(text):
                entry = LinkTime.model_validate(data)
                key = (entry.what, entry.ranks, entry.size_bytes)
                if key not in found or found[key].time_s < entry.time_s:
                    found[key] = entry
        return tuple(found.values())

    def _begin(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self._done, self._total, what)
        self._done += 1


@dataclass(frozen=True)
class LinkStep:
    """Item to time: a message, an all-reduce, or a crowd (sources, then their targets)."""

    what: Literal["message", "all_reduce", "crowd"]
    ranks: tuple[int, ...]


def list_steps(levels: Sequence[RankLevel], index: int, num_ranks: int) -> list[LinkStep]:
    """List what to time at a level: two pairs both ways, and all-reduces."""
    inner = levels[index - 1].group_size if index else 1
    outer = min(levels[index].group_size, num_ranks)
    firsts = tuple(range(0, outer, inner))
    pairs = {(firsts[0], firsts[1]), (firsts[-2], firsts[-1])}
    steps = [LinkStep("message", ends) for a, b in sorted(pairs) for ends in ((a, b), (b, a))]
    steps.append(LinkStep("all_reduce", firsts))
    if inner > 1:
        steps.append(LinkStep("all_reduce", tuple(range(outer))))
        sources = range(min(inner, outer - inner, MOST_CROWDED))
        if len(sources) > 1:
            steps.append(LinkStep("crowd", (*sources, *(inner + rank for rank in sources))))
    return steps
