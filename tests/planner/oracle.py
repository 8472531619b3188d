"""Every plan there is, by brute force: the oracle of the planner's tests.

All legal cuts, all replicas, all devices of every class, recomputed or not: tried one after
another, stage by stage from the last to the first. A beginning is given up only where a rule of
docs/concepts/planner.md is broken already, or where its part of the objective is no longer below
the best found, as no stage ever lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple

from stagewright.planner.validation import reference_cost as recount
from stagewright.planner.validation.reference_cost import ReferenceSplit
from stagewright.planner.validation.reference_placement import StagePlacement, level_between


class Choice(NamedTuple):
    """One stage: layers first to last - 1, its devices, and whether it is recomputed."""

    first: int
    last: int
    devices: tuple[int, ...]
    recompute: bool


@dataclass(frozen=True)
class Found:
    """The best split, and its objective with whatever decides between equals."""

    rank: tuple[float, ...]
    split: ReferenceSplit


def least(instance, by=None):
    """The smallest objective of any usable plan, and a plan that has it; `None` without any.

    Args:
        instance: Profile, cluster and options.
        by: Rank by this objective instead of the options'.
    """
    search = Search(instance, by or instance.options.objective)
    found = None
    for choices in search.plans():
        rank = search.rank(choices)
        if found is None or rank < found.rank:
            split = search.split(choices)
            if split.is_usable():
                found = Found(rank, split)
                search.best = rank
    return found


def usable_plans(instance, keeps=lambda split: True) -> Iterator[ReferenceSplit]:
    """Every usable plan that keeps a rule, one after another; few keep a strict one."""
    search = Search(instance, instance.options.objective)
    for choices in search.plans():
        split = search.split(choices)
        if keeps(split) and split.is_usable():
            yield split


class Search:
    """The stages of one instance, each number of `recount` counted once.

    ``best`` is the best objective found so far; nothing that must be above it is tried.
    """

    def __init__(self, instance, objective):
        self.profile = instance.profile
        self.cluster = instance.cluster
        self.options = instance.options
        self.objective = objective
        self.best = None
        self.only_forward = self.options.objective == "latency"
        self.work = lru_cache(maxsize=None)(self._work)
        self.memory = lru_cache(maxsize=None)(self._memory)
        self.sync_s = lru_cache(maxsize=None)(self._sync_s)
        self.sends = lru_cache(maxsize=None)(self._sends)
        self.level = lru_cache(maxsize=None)(
            lambda one, other: level_between(self.cluster, one, other)
        )
        self.fastest = max(device.speed for device in self.cluster.devices)
        whole = [sum(recount.work_s(self.profile, range(n), 1)) for n in range(1, self.num_layers)]
        self.rest_s = [0.0, *(time_s / self.fastest for time_s in whole)]
        self.in_front_s = [
            math.fsum(entry.backward.median_s for entry in self.profile.layers[:first])
            / self.fastest
            for first in range(self.num_layers)
        ]

    @property
    def num_layers(self):
        return len(self.profile.layers)

    @cached_property
    def starts(self):
        """Layers a stage may begin with, those in front of a legal cut that nothing forbids."""
        names = [entry.layer.name for entry in self.profile.layers]
        forbidden = {names.index(name) + 1 for name in self.options.no_cut_after}
        for pair in self.options.together:
            one, other = sorted(names.index(name) for name in pair)
            forbidden |= set(range(one + 1, other + 1))
        legal = [gap.after + 1 for gap in self.profile.boundaries if gap.legal]
        return [0, *(cut for cut in legal if cut not in forbidden)]

    @cached_property
    def classes(self):
        """For each class, every run of its devices a stage may be on, and whether it then has to
        be the last there."""
        everyone = range(len(self.cluster.devices))
        members = dict.fromkeys(
            tuple(StagePlacement(self.cluster, (index,)).peers) for index in everyone
        )
        most = self.options.max_replicas or self.options.num_microbatches
        most = 1 if self.only_forward else min(most, self.options.num_microbatches)
        classes = []
        for devices in members:
            runs = []
            for begin, end in combinations(range(len(devices) + 1), 2):
                run = tuple(devices[begin:end])
                if end - begin <= most and not list(StagePlacement(self.cluster, run).faults()):
                    only_last = bool(list(StagePlacement(self.cluster, run).faults(is_last=False)))
                    runs.append((begin, end, run, only_last))
            classes.append(runs)
        return classes

    @cached_property
    def members(self):
        """For each class, the devices of its runs."""
        return [{device for run in runs for device in run[2]} for runs in self.classes]

    @cached_property
    def most_stages(self):
        options = self.options
        limits = [options.num_stages, options.max_stages, len(self.cluster.devices)]
        return min(limit for limit in limits if limit is not None)

    def plans(self) -> Iterator[tuple[Choice, ...]]:
        """Stages that fit their devices, front to back."""
        ends = tuple(max((run[1] for run in runs), default=0) for runs in self.classes)
        yield from self._in_front(self.num_layers, (), ends, Sums())

    def _in_front(self, last, behind, ends, sums):
        if last == 0:
            if self.options.num_stages in (None, len(behind)):
                yield behind
            return
        if len(behind) == self.most_stages:
            return
        for first in self.starts:
            if first >= last:
                break
            for index, (runs, members) in enumerate(zip(self.classes, self.members, strict=True)):
                taken = set()
                used = any(choice.devices[0] in members for choice in behind)
                for begin, end, devices, only_last in reversed(runs):
                    if end > ends[index] or (used and only_last):
                        continue
                    if len(self.cluster.levels) < 2 and len(devices) in taken:
                        continue  # one level: where the idle devices are changes nothing
                    taken.add(len(devices))
                    left = (*ends[:index], begin, *ends[index + 1 :])
                    for recompute in self._may_recompute():
                        choice = Choice(first, last, devices, recompute)
                        then = self._add(sums, choice, behind)
                        if then is None:
                            continue
                        if self.best is not None and self._bound(then, first) > self.best:
                            continue
                        yield from self._in_front(first, (choice, *behind), left, then)

    def _may_recompute(self):
        if self.only_forward or self.options.recompute == "never":
            return (False,)
        return (True,) if self.options.recompute == "always" else (False, True)

    def _add(self, sums, choice, behind):
        """The sums with one more stage in front; `None` if it does not fit."""
        span, count = (choice.first, choice.last), len(choice.devices)
        own = 1 if self.only_forward else -(-self.options.num_microbatches // count)
        rounds = 1 + math.ceil(sums.ahead / count)
        held = own if self.options.schedule == "gpipe" else min(own, rounds)
        needed, gradients = self.memory(span, choice.recompute, own, held, count)
        device = self.cluster.devices[choice.devices[0]]
        if device.memory_bytes is not None and needed > math.floor(
            device.memory_bytes * self.options.memory_fraction
        ):
            return None
        forward_s, backward_s = self.work(span, device.speed, choice.recompute)
        out_s = back_s = 0.0
        if behind:
            level = self.level(choice.devices[-1], behind[0].devices[0])
            out_s, back_s = self.sends(choice.last, level)
        whole_s = forward_s + backward_s + out_s + back_s
        sync_s = 0.0 if self.only_forward else self.sync_s(choice.devices, gradients)
        return Sums(
            ahead=rounds * count,
            total_s=sums.total_s + whole_s,
            forward_s=sums.forward_s + forward_s + out_s,
            slowest_s=max(sums.slowest_s, (own - 1) * whole_s),
            slowest_forward_s=max(sums.slowest_forward_s, (own - 1) * forward_s),
            slowest_backward_s=max(sums.slowest_backward_s, (own - 1) * backward_s),
            steady_s=max(sums.steady_s, whole_s / count),
            sync_s=max(sums.sync_s, sync_s),
            exposed_s=max(sums.exposed_s, sync_s - self.in_front_s[choice.first]),
            largest_bytes=max(sums.largest_bytes, needed),
            devices=sums.devices + count,
            stage_s=max(sums.stage_s, forward_s + backward_s),
            stage_bytes=max(sums.stage_bytes, self._size_bytes(span)),
        )

    def rank(self, choices):
        """The objective of a plan, and what decides between equal ones."""
        sums = Sums()
        for index in reversed(range(len(choices))):
            sums = self._add(sums, choices[index], choices[index + 1 :])
        tied_s = self.split(choices).tied_sync_s() if self._is_tied else 0.0
        return self._rank(sums, 0.0, tied_s)

    @cached_property
    def _is_tied(self):
        parameters = recount.parameters_of(self.profile)
        return any(recount.is_learned(entry) and len(entry.layers) > 1 for entry in parameters)

    def _bound(self, sums, first):
        """What no plan that ends with these stages is below."""
        return self._rank(sums, self.rest_s[first], 0.0, rounding=1e-9)

    def _rank(self, sums, rest_s, tied_s, rounding=0.0):
        if self.options.schedule == "gpipe":
            slowest_s = sums.slowest_forward_s + sums.slowest_backward_s
        else:
            slowest_s = sums.slowest_s
        step_s = (sums.total_s + rest_s + slowest_s + sums.exposed_s + tied_s) * (1 - rounding)
        if self.objective == "throughput":
            rank = (sums.steady_s + sums.sync_s / self.options.num_microbatches,)
        elif self.objective == "latency":
            rank = (sums.forward_s,)
        elif self.objective == "memory":
            rank = (sums.largest_bytes, step_s)
        elif self.objective == "devices":
            rank = (sums.devices, step_s)
        elif self.objective == "balance_time":
            rank = (sums.stage_s,)
        elif self.objective == "balance_size":
            rank = (sums.stage_bytes,)
        else:
            rank = (step_s,)
        return rank

    def split(self, choices):
        """The same plan, to be counted as a whole."""
        return ReferenceSplit(
            counts=tuple(choice.last - choice.first for choice in choices),
            devices=tuple(choice.devices for choice in choices),
            recompute=tuple(choice.recompute for choice in choices),
            profile=self.profile,
            cluster=self.cluster,
            options=self.options,
        )

    def _work(self, span, speed, recompute):
        return recount.work_s(self.profile, range(*span), speed, recompute)

    @property
    def _sharing(self):
        shared = [name for name in ("zero1", "fully_shard") if name in self.options.strategies]
        return shared[:1]

    def _memory(self, span, recompute, own, held, replicas):
        """The least that the replicas can hold, however they share, and what they send then."""
        uses = {
            strategy: recount.memory(
                self.profile,
                self.options,
                range(*span),
                recompute=recompute,
                microbatches=own,
                held=held,
                replicas=replicas,
                strategy=strategy,
            ).total_bytes
            for strategy in ("replicate", *(self._sharing if replicas > 1 else ()))
        }
        strategy = min(uses, key=uses.get)
        rounds = own if strategy == "fully_shard" else 0
        weights = recount.weights_of(self.profile, self.options, range(*span))
        return uses[strategy], weights.summed_bytes(self.options, rounds, recompute=recompute)

    def _size_bytes(self, span):
        if self.objective != "balance_size":
            return 0
        weights = self._memory_use(span).weights_bytes
        return weights + recount.saved_bytes(self.profile, range(*span))

    def _memory_use(self, span):
        return recount.memory(
            self.profile, self.options, range(*span), recompute=False, microbatches=1, held=1
        )

    def _sync_s(self, devices, size_bytes):
        return StagePlacement(self.cluster, devices).all_reduce_s(size_bytes)

    def _sends(self, cut, level):
        gap, link = self.profile.boundaries[cut - 1], self.cluster.levels[level]
        return link.transfer_time_s(gap.forward_bytes), link.transfer_time_s(gap.backward_bytes)


@dataclass(slots=True)
class Sums:
    """What the objectives need to know of some stages; not frozen, which takes three times as long.

    ``ahead``: micro-batches between forward and backward at the first of them, not capped: ``D``.
    """

    ahead: int = 0
    total_s: float = 0.0
    forward_s: float = 0.0
    slowest_s: float = 0.0
    slowest_forward_s: float = 0.0
    slowest_backward_s: float = 0.0
    steady_s: float = 0.0
    sync_s: float = 0.0
    exposed_s: float = 0.0
    largest_bytes: int = 0
    devices: int = 0
    stage_s: float = 0.0
    stage_bytes: int = 0
