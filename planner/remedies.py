"""Remedies for an infeasible request: changes under which a plan exists, with its step time.

Each kind of change is tried from its smallest form up: first whether anything fits at all, then a
quick plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from ..core.cluster.cluster import Cluster, Device
from ..core.cluster.places import largest_groups
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions, Remedy
from ..core.plan.schedule import TrainingSchedule
from ..core.profile.profile import Profile
from ..core.profile.scale import get_microbatch_size
from ..core.units import format_time
from ..schedules.traits import CLOSED_FORM
from .cost.chain import ChainCosts, chain_costs
from .microbatch_size import list_candidates, make_request, may_fit, only_planning_tells
from .problem.constraints import allowed_positions
from .problem.layer_checkpoints import checkpoint_costs, list_checkpoints, may_checkpoint
from .problem.problem import PlanningRequest

BUDGET_S = 2.0
"""Time for all remedies together, within the caller's deadline; later step times stay unknown."""

EACH_COUNT = 32
"""Micro-batches up to which every smaller number is tried; above, the number is halved."""

MAX_DEVICES = 1024
"""Most devices that are suggested."""

SHARES = 4
"""Parts of the time left, one for each change that only a plan can judge."""

Attempt = Callable[[Cluster, PlanOptions, float], Plan]
"""Function that plans for a cluster and options until a deadline on `time.monotonic`."""


@dataclass(frozen=True)
class Change:
    """Changed request that may be feasible.

    It is not settled if the deadline cut its plan's search short.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    plan: Plan | None = None
    is_settled: bool = True


def add_remedies(
    error: Infeasible,
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    attempt: Attempt,
    deadline: float = math.inf,
) -> Infeasible:
    """Return the error with the changes that help, least step time per sample first.

    ``attempt`` plans a changed request, without looking for remedies in turn.
    """
    search = _Search(profile, attempt, min(deadline, time.monotonic() + BUDGET_S))
    found = [search.more_devices(cluster, options)]
    found += [search.more_devices(cluster, options, like) for like in _pinned(cluster, options)]
    found += [search.first_fitting(changes) for changes in _kinds(profile, cluster, options)]
    fitting = [change for change in found if change is not None]
    # No single change helps: more devices together with recomputation are the likeliest pair.
    if not fitting and options.recompute == "never":
        both = search.more_devices(cluster, _with(options, recompute="auto"))
        if both is not None:
            fitting = [replace(both, text=f"recompute='auto' and {both.text}")]
    remedies = sorted(search.time_plans(fitting), key=lambda remedy: _cost(remedy, options))
    return Infeasible(
        f"{error}; {_advice(remedies, options, error.constraint, cut_short=search.is_over)}",
        constraint=error.constraint,
        required=error.required,
        available=error.available,
        remedies=tuple(remedies),
        summary=error.summary,
    )


def keep_remedies(
    error: Infeasible, options: PlanOptions, is_allowed: Callable[[Remedy], bool]
) -> Infeasible:
    """Return the error with those of its remedies that are allowed.

    Without any it names none of the changes tried, some of which may not be allowed.
    """
    kept = tuple(filter(is_allowed, error.remedies))
    if error.summary == str(error):
        return error
    advice = "no change that is allowed was found to help; use more or larger devices"
    if kept:
        advice = _advice(kept, options, error.constraint, cut_short=False)
    return Infeasible(
        f"{error.summary}; {advice}",
        constraint=error.constraint,
        required=error.required,
        available=error.available,
        remedies=kept,
        summary=error.summary,
    )


def with_devices(cluster: Cluster, count: int, like: Device | None = None) -> Cluster:
    """Return the cluster enlarged to ``count`` devices by copies of one, its last by default.

    The outermost link level joins them all; a cluster of one device gets the default link.
    """
    last, names = like or cluster.devices[-1], {device.name for device in cluster.devices}
    more: list[Device] = []
    number = 0
    while len(cluster.devices) + len(more) < count:
        number += 1
        name = f"{last.name}+{number}"
        if name not in names:
            more.append(last.model_copy(update={"name": name}))
    if not more:
        return cluster
    levels = cluster.levels or Cluster.uniform(count).levels
    sizes = largest_groups(cluster) or (count,)
    inner = sizes[-2] if len(sizes) > 1 else 1
    if any(link.group_size is None for link in levels[:-1]):
        more = _place_in_new_groups(more, cluster)
        levels = (*levels[:-1], levels[-1].model_copy(update={"group_size": None}))
    else:
        whole = -(-max(count, sizes[-1]) // inner) * inner
        levels = (*levels[:-1], levels[-1].model_copy(update={"group_size": whole}))
    return Cluster(devices=(*cluster.devices, *more), levels=levels, links=cluster.links)


def _place_in_new_groups(more: list[Device], cluster: Cluster) -> list[Device]:
    """Return the devices in groups of their own, as large as the largest ones there are."""
    sizes = largest_groups(cluster)
    names = [link.name for link in cluster.levels[:-1] if link.group_size is None]
    sized = [
        size
        for size, link in zip(sizes, cluster.levels[:-1], strict=False)
        if link.group_size is None
    ]
    return [
        device.model_copy(
            update={
                "place": {
                    name: f"+{number // size}" for name, size in zip(names, sized, strict=True)
                }
            }
        )
        for number, device in enumerate(more)
    ]


class _Search:
    """Trial of changes until a deadline on the clock of `time.monotonic`."""

    def __init__(self, profile: Profile, attempt: Attempt, deadline: float) -> None:
        self.profile, self.attempt, self.deadline = profile, attempt, deadline
        self._tables: dict[tuple[int, ...], ChainCosts] = {}

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def first_fitting(self, changes: Iterable[Change]) -> Change | None:
        """Return the first change that helps, or `None` if there is none or time is up."""
        for change in changes:
            if self.is_over:
                return None
            fitting = self._check(change)
            if fitting is not None:
                return fitting
        return None

    def more_devices(
        self, cluster: Cluster, options: PlanOptions, like: Device | None = None
    ) -> Change | None:
        """Find the fewest devices that help: doubled up to one per stage, then bisected."""
        low = len(cluster.devices)
        most = len(allowed_positions(self.profile, options)) - 1
        if options.max_replicas != 1:
            most = max(most, 4 * low)
        counts = [low]
        while counts[-1] < min(most, MAX_DEVICES):
            counts.append(min(2 * counts[-1], most, MAX_DEVICES))
        found = self.first_fitting(
            _on_devices(cluster, options, count, like) for count in counts[1:]
        )
        if found is None:
            return None
        high = len(found.cluster.devices)
        low = counts[counts.index(high) - 1]
        while high - low > 1:
            middle = _on_devices(cluster, options, (low + high) // 2, like)
            fitting = self.first_fitting([middle])
            if fitting is None:
                low = len(middle.cluster.devices)
            else:
                found, high = fitting, len(middle.cluster.devices)
        return found

    def time_plans(self, changes: Sequence[Change]) -> Iterator[Remedy]:
        """Plan each change in its share of the time left; drop those that no plan confirms.

        If the deadline cut a plan's search short, its step is an upper bound.
        """
        for place, change in enumerate(changes):
            if change.plan is None and time.monotonic() < self.deadline:
                try:
                    change = self._plan(change, len(changes) - place)
                except DeadlineExceeded:
                    pass
                except (Infeasible, InvalidInput):
                    continue
            made, options, text = change.plan, change.options, change.text
            if made is not None and options.batch_size is not None:
                options = _with(options, num_microbatches=made.options.num_microbatches)
                text += f" (micro-batches of {made.inputs[0].shape[0]})"
            step_time_s = None if made is None else made.step_time_s
            yield Remedy(text, change.cluster, options, step_time_s, change.is_settled)

    def _plan(self, change: Change, shares: int) -> Change:
        """Return the change with a plan made in one of ``shares`` parts of the time left."""
        now = time.monotonic()
        until = now + (self.deadline - now) / shares
        made = self.attempt(change.cluster, change.options, until)
        return replace(change, plan=made, is_settled=time.monotonic() <= until)

    def _check(self, change: Change) -> Change | None:
        """Return the change if some plan fits, with that plan if only planning can tell."""
        try:
            if only_planning_tells(change.options):
                return self._plan(change, SHARES)
            return change if self._fits(change) else None
        except (InvalidInput, Infeasible, DeadlineExceeded):
            return None

    def _fits(self, change: Change) -> bool:
        if change.options.recompute == "layers":
            found = checkpoint_costs(self.profile, list_checkpoints(self.profile))
            options = _with(change.options, recompute="never", batch_size=None)
            return may_fit(PlanningRequest(found, change.cluster, options, deadline=self.deadline))
        if change.options.batch_size is None:
            asked = (self.profile, change.cluster, change.options, self._table_of)
            return may_fit(PlanningRequest(*asked, deadline=self.deadline))
        return any(
            may_fit(make_request(entry, change.cluster, time.monotonic(), self.deadline))
            for entry in list_candidates([self.profile], change.options)
        )

    def _table_of(self, positions: tuple[int, ...]) -> ChainCosts:
        if positions not in self._tables:
            self._tables = {positions: chain_costs(self.profile, positions)}
        return self._tables[positions]


def _kinds(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[Iterator[Change]]:
    """List kinds of changes, each from its smallest form up."""
    ask = partial(_change, cluster, options)
    kinds = [_fewer_microbatches(cluster, options)]
    kinds += [
        iter([_on_schedule(cluster, options, name)])
        for name in get_args(TrainingSchedule)
        if name in CLOSED_FORM and name != options.schedule and options.objective != "latency"
    ]
    for name, value, is_changed in (
        ("recompute", "auto", options.recompute != "auto"),
        ("recompute", "layers", may_checkpoint(options)),
        ("max_replicas", None, options.max_replicas is not None),
        ("optimizer", "sgd", options.optimizer in ("momentum", "adam")),
        ("memory_fraction", 1.0, options.memory_fraction < 1),
        ("num_stages", None, options.num_stages is not None),
        ("max_stages", None, options.max_stages is not None and options.num_stages is None),
        ("objective", "step_time", options.objective.startswith(("balance", "pipedream"))),
        ("tied", "priced", options.tied == "together"),
        ("pins", (), bool(options.pins)),
        ("together", (), bool(options.together)),
        ("no_cut_after", (), bool(options.no_cut_after)),
    ):
        if is_changed:
            kinds.append(iter([ask(**{name: value})]))
    if options.batch_size is None and profile.inputs and profile.inputs[0].shape:
        size = profile.inputs[0].shape[0]
        if size > 1:
            kinds.append(
                iter([ask(batch_size=options.num_microbatches * get_microbatch_size(profile))])
            )
    return kinds


def _change(cluster: Cluster, options: PlanOptions, **changes: object) -> Change:
    ((name, value),) = changes.items()
    words = {
        "num_stages": "any number of stages",
        "max_stages": "any number of stages",
        "max_replicas": "any number of replicas",
        "pins": "no pins",
        "together": "no layers kept together",
        "no_cut_after": "no forbidden cuts",
    }
    return Change(words.get(name, f"{name}={value!r}"), cluster, _with(options, **changes))


def _on_schedule(cluster: Cluster, options: PlanOptions, name: TrainingSchedule) -> Change:
    # Without the options that only the original schedule has.
    options = _with(options, schedule=name, chunks=PlanOptions().chunks, max_extra_in_flight=0)
    return Change(f"schedule={name!r}", cluster, options)


def _fewer_microbatches(cluster: Cluster, options: PlanOptions) -> Iterator[Change]:
    # A stage has no more replicas than micro-batches, so fewer micro-batches may not help.
    count = options.num_microbatches
    while count > 1 and options.batch_size is None and options.objective != "latency":
        count = count - 1 if count <= EACH_COUNT else count // 2
        yield _change(cluster, options, num_microbatches=count)


def _pinned(cluster: Cluster, options: PlanOptions) -> list[Device]:
    """Return a device of each kind that layers are pinned to, except the last device's kind."""
    wanted = {pin.kind for pin in options.pins} - {cluster.devices[-1].kind}
    return list({one.kind: one for one in cluster.devices if one.kind in wanted}.values())


def _on_devices(
    cluster: Cluster, options: PlanOptions, count: int, like: Device | None = None
) -> Change:
    text = f"{count} devices" if like is None else f"{count} devices, the new ones {like.kind!r}"
    return Change(text, with_devices(cluster, count, like), options)


def _with(options: PlanOptions, **changes: object) -> PlanOptions:
    given = {name: getattr(options, name) for name in options.model_fields_set}
    if "batch_size" in changes:
        given.pop("num_microbatches", None)  # with both there would be no size to choose
    return PlanOptions.model_validate({**given, **changes})


def _cost(remedy: Remedy, asked: PlanOptions) -> float:
    """Return the seconds for as many samples as the request has in a step."""
    if remedy.step_time_s is None:
        return math.inf
    if remedy.options.batch_size is not None:
        return remedy.step_time_s
    return remedy.step_time_s * asked.num_microbatches / remedy.options.num_microbatches


def _advice(
    remedies: Sequence[Remedy], asked: PlanOptions, constraint: str, *, cut_short: bool
) -> str:
    if not remedies and cut_short:
        other = "recompute='auto', " * (asked.recompute != "auto")
        other += (
            "fewer or smaller micro-batches" if asked.num_microbatches > 1 else "smaller samples"
        )
        return f"no remedy was found in the time allowed; try {other}, or more devices"
    if not remedies and constraint == "memory":
        return (
            "none of the changes tried helps (recomputation, more devices like these, fewer or "
            "smaller micro-batches, another schedule or optimizer); use devices with more memory"
        )
    if not remedies:
        return "none of the single changes tried helps"
    return f"it would fit with {', or '.join(_in_words(entry, asked) for entry in remedies)}"


def _in_words(remedy: Remedy, asked: PlanOptions) -> str:
    if remedy.step_time_s is None:
        return remedy.text
    most = "" if remedy.is_settled else "at most "
    words = f"{remedy.text}: {most}{format_time(remedy.step_time_s)} per step"
    count, wanted = remedy.options.num_microbatches, asked.num_microbatches
    if remedy.options.batch_size is None and count != wanted:
        words += f" of {count / wanted:.3g} times the samples"
    return words
