"""Remedies for an infeasible request: changes under which a plan exists, with its step time.

Each kind of change is tried from its mildest form up: first whether anything fits at all, then a
quick plan. What needs no other devices comes first, and of that what trains the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import get_args

from ..core.cluster.cluster import Cluster, Device
from ..core.cluster.places import largest_groups
from ..core.cluster.shorthand import enlarge
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.models.training_memory import Optimizer
from ..core.plan.plan import Plan, PlanOptions, Remedy
from ..core.plan.schedule import TrainingSchedule
from ..core.profile.profile import Profile
from ..core.units import format_time
from ..schedules.traits import CLOSED_FORM
from .cost.chain import ChainCosts, chain_costs
from .microbatch_size import list_candidates, make_request, may_fit, only_planning_tells
from .problem.constraints import allowed_positions
from .problem.layer_checkpoints import checkpoint_costs, list_checkpoints, may_checkpoint
from .problem.problem import PlanningRequest
from .problem.training_options import list_lighter
from .solvers.feasibility import lacks_memory

BUDGET_S = 2.0
"""Time for all remedies together, within the caller's deadline; later step times stay unknown."""

OPTIONS_SHARE = 0.6
"""Share of that time for changes of one option; more devices and pairs of changes get the rest."""

EACH_COUNT = 32
"""Micro-batches up to which every smaller number is tried; above, the number is halved."""

MAX_DEVICES = 1024
"""Most devices that are suggested."""

SHARES = 4
"""Parts of the time left, one for each change that only a plan can judge."""

Attempt = Callable[[Cluster, PlanOptions, float], Plan]
"""Function that plans for a cluster and options until a deadline on `time.monotonic`."""

Update = dict[str, object]
"""Options to change, by name."""

SAME, OTHER_TRAINING, MORE_DEVICES = range(3)
"""Prices of changes: the same training on the same devices; another batch, optimizer or precision;
and more devices."""


@dataclass(frozen=True)
class Kind:
    """Changes of one kind, from the mildest up.

    Those that save memory may be combined; the last is not always the one that needs least.
    """

    price: int
    updates: Sequence[Update]
    saves: bool = False
    last_is_least: bool = True


@dataclass(frozen=True)
class Change:
    """Changed request that may be feasible.

    It is not settled if the deadline cut its plan's search short.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    price: int
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
    """Return the error with the changes that help: cheapest first, then least step per sample.

    ``attempt`` plans a changed request, without looking for remedies in turn.
    """
    began = time.monotonic()
    deadline = min(deadline, began + BUDGET_S)
    search = _Search(profile, attempt, began + OPTIONS_SHARE * (deadline - began))
    kinds = list_kinds(profile, cluster, options)
    make = partial(_change, cluster, options)
    found = []
    for kind in kinds:
        changes = [make(kind.price, update) for update in kind.updates]
        least = changes[-1] if len(changes) > 1 and kind.last_is_least else None
        found.append(search.first_fitting(changes, least))
    helps = any(found)
    search.deadline = deadline
    found.append(search.more_devices(cluster, options))
    found += [search.more_devices(cluster, options, like) for like in _pinned(cluster, options)]
    if not helps:
        found.append(search.first_fitting(make(*both) for both in _combine(kinds)))
    fitting = [change for change in found if change is not None]
    # No change helps: more devices together with recomputation are the likeliest pair.
    if not fitting and options.recompute == "never":
        both = search.more_devices(cluster, _with(options, recompute="auto"))
        if both is not None:
            fitting = [replace(both, text=f"recompute='auto' and {both.text}")]
    timed = sorted(search.time_plans(fitting), key=lambda one: (one[0], _cost(one[1], options)))
    remedies = tuple(remedy for _, remedy in timed)
    tried = "of the changes" + (" checked in the time allowed" if search.is_over else " tried")
    advice = _advice(remedies, options, error.constraint, tried)
    return error.with_advice(advice, remedies)


def keep_remedies(
    error: Infeasible, options: PlanOptions, is_allowed: Callable[[Remedy], bool]
) -> Infeasible:
    """Return the error with those of its remedies that are allowed.

    Without any it names none of the changes tried, some of which may not be allowed.
    """
    kept = tuple(filter(is_allowed, error.remedies))
    if error.summary == str(error):
        return error
    tried = "of the changes tried and allowed"
    return error.with_advice(_advice(kept, options, error.constraint, tried), kept)


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


def may_be_planned(
    profile: Profile, cluster: Cluster, options: PlanOptions, attempt: Attempt, deadline: float
) -> bool:
    """Return True if some plan is found to fit, without looking for the best."""
    search = _Search(profile, attempt, deadline)
    return search.first_fitting([Change("", cluster, options, SAME)]) is not None


class _Search:
    """Trial of changes until a deadline on the clock of `time.monotonic`."""

    def __init__(self, profile: Profile, attempt: Attempt, deadline: float) -> None:
        self.profile, self.attempt, self.deadline = profile, attempt, deadline
        self._tables: dict[tuple[int, ...], ChainCosts] = {}

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def first_fitting(
        self, changes: Iterable[Change], least: Change | None = None
    ) -> Change | None:
        """Return the first change that helps, or `None` if there is none or time is up.

        If ``least``, which needs the least memory of them, does not help, none does.
        """
        if least is not None and (self.is_over or self._check(least) is None):
            return None
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
        split = 1 if options.tensor == "auto" else options.tensor
        most = split * (len(allowed_positions(self.profile, options)) - 1)
        if options.max_replicas != 1:
            most = max(most, 4 * low)
        counts = [low]
        while counts[-1] < min(most, MAX_DEVICES):
            counts.append(min(2 * counts[-1], most, MAX_DEVICES))
        found, high = None, low
        for high in counts[1:]:
            found = self.first_fitting([_on_devices(cluster, options, high, like)])
            if found is not None:
                break
            low = high
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            fitting = self.first_fitting([_on_devices(cluster, options, middle, like)])
            if fitting is None:
                low = middle
            else:
                found, high = fitting, middle
        return found

    def time_plans(self, changes: Sequence[Change]) -> Iterator[tuple[int, Remedy]]:
        """Plan each change in its share of the time left; drop those that no plan confirms.

        Yields the price of each with its remedy.

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
            remedy = Remedy(text, change.cluster, options, step_time_s, change.is_settled)
            yield change.price, remedy

    def _plan(self, change: Change, shares: int) -> Change:
        """Return the change with a plan made in one of ``shares`` parts of the time left."""
        now = time.monotonic()
        until = now + (self.deadline - now) / shares
        made = self.attempt(change.cluster, change.options, until)
        return replace(change, plan=made, is_settled=time.monotonic() <= until)

    def _check(self, change: Change) -> Change | None:
        """Return the change if some plan fits, with that plan if only planning can tell."""
        try:
            requests = list(self._requests(change))
            if all(lacks_memory(request, request.devices) for request in requests):
                return None
            if only_planning_tells(change.options) or change.options.tensor != 1:
                return self._plan(change, SHARES)
            return change if any(map(may_fit, requests)) else None
        except (InvalidInput, Infeasible, DeadlineExceeded):
            return None

    def _requests(self, change: Change) -> Iterator[PlanningRequest]:
        """Yield the changed request, or one for each micro-batch size."""
        profile, options = self.profile, _with(change.options, tensor=1)
        table_of: Callable[[tuple[int, ...]], ChainCosts] | None = self._table_of
        if options.recompute == "layers":
            profile, table_of = checkpoint_costs(profile, list_checkpoints(profile)), None
            options = _with(options, recompute="never")
        if options.batch_size is None:
            yield PlanningRequest(
                profile, change.cluster, options, table_of, deadline=self.deadline
            )
            return
        for entry in list_candidates([profile], options):
            yield make_request(entry, change.cluster, time.monotonic(), self.deadline)

    def _table_of(self, positions: tuple[int, ...]) -> ChainCosts:
        if positions not in self._tables:
            self._tables = {positions: chain_costs(self.profile, positions)}
        return self._tables[positions]


def list_kinds(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[Kind]:
    """List the kinds of changes that keep the devices, in the order in which they are tried."""
    shape = profile.inputs[0].shape if profile.inputs else ()
    samples = options.num_microbatches * shape[0] if shape else 0
    counts = _fewer_microbatches(options.num_microbatches)
    # Without the options that only the original schedule has.
    usual = {"chunks": PlanOptions().chunks, "max_extra_in_flight": 0}
    schedules: list[Update] = [
        {"schedule": name, **usual}
        for name in get_args(TrainingSchedule)
        if name in CLOSED_FORM and name != options.schedule
    ]
    kinds = [
        Kind(SAME, [{"recompute": "auto"}], saves=True),
        Kind(SAME, [{"recompute": "layers"}] * may_checkpoint(options), saves=True),
    ]
    if options.objective != "latency":
        lighter, recipes = LIGHTER.get(options.optimizer, ()), list_lighter(profile, options)
        kinds += [
            Kind(OTHER_TRAINING, [{"optimizer": name} for name in lighter], saves=True),
            Kind(OTHER_TRAINING, [{"precision": name} for name in recipes], saves=True),
            *(Kind(SAME, [update]) for update in schedules),
        ]
        if options.batch_size is None:
            smaller: list[Update] = [{"batch_size": samples}] * (samples > options.num_microbatches)
            fewer: list[Update] = [{"num_microbatches": count} for count in counts]
            # A stage has no more replicas than micro-batches, so fewer of them may not help.
            is_least = options.max_replicas == 1
            kinds += [Kind(SAME, smaller, saves=True), Kind(OTHER_TRAINING, fewer, False, is_least)]
    kinds += [Kind(SAME, [{name: value}]) for name, value in FREEDOMS.items()]
    if options.objective.startswith(("balance", "pipedream")):
        kinds.append(Kind(SAME, [{"objective": "step_time"}]))
    if len(cluster.devices) > 1 and options.strategies == ("replicate",):
        kinds.append(Kind(SAME, SHARING, saves=True, last_is_least=False))
    if len(cluster.devices) > 1 and profile.splits and options.tensor == 1:
        kinds.append(Kind(SAME, [{"tensor": "auto"}]))
    return [kind for kind in kinds if any(_differs(options, update) for update in kind.updates)]


def _differs(options: PlanOptions, update: Update) -> bool:
    return any(getattr(options, name) != value for name, value in update.items())


FREEDOMS: Update = {
    "max_replicas": None, "memory_fraction": 1.0, "num_stages": None, "max_stages": None,
    "tied": "priced", "pins": (), "together": (), "no_cut_after": (),
}  # fmt: skip
"""Options that constrain plans, with the values that do not."""

SHARING: list[Update] = [
    {"strategies": (name,), "max_replicas": None} for name in ("zero1", "fully_shard")
]

LIGHTER: dict[Optimizer, tuple[Optimizer, ...]] = {
    "adam": ("adamw_8bit", "sgd"),
    "momentum": ("sgd",),
    "muon": ("sgd",),
}
"""Optimizers that keep less state than another."""


def _combine(kinds: Sequence[Kind]) -> Iterator[tuple[int, Update]]:
    """Yield two and three of the changes that save memory at once, those of least price first."""
    savers = [kind for kind in kinds if kind.saves and kind.updates]
    for size, form in ((2, 0), (2, -1), (3, -1)):
        sets = combinations(savers, size)
        for some in sorted(sets, key=lambda some: max(kind.price for kind in some)):
            updates = [kind.updates[form] for kind in some]
            merged = {name: value for update in updates for name, value in update.items()}
            if len(merged) == sum(map(len, updates)):  # not two values of one option
                yield max(kind.price for kind in some), merged


def _change(cluster: Cluster, options: PlanOptions, price: int, update: Update) -> Change:
    words = {
        "num_stages": "any number of stages",
        "max_stages": "any number of stages",
        "max_replicas": "any number of replicas",
        "pins": "no pins",
        "together": "no layers kept together",
        "no_cut_after": "no forbidden cuts",
    }
    texts = [
        words.get(name) or f"{name}={(value[0] if isinstance(value, tuple) else value)!r}"
        for name, value in update.items()
    ]
    if "schedule" in update:
        texts = texts[:1]
    return Change(" and ".join(texts), cluster, _with(options, **update), price)


def _fewer_microbatches(count: int) -> Iterator[int]:
    while count > 1:
        count = count - 1 if count <= EACH_COUNT else count // 2
        yield count


def _pinned(cluster: Cluster, options: PlanOptions) -> list[Device]:
    """Return a device of each kind that layers are pinned to, except the last device's kind."""
    wanted = {pin.kind for pin in options.pins} - {cluster.devices[-1].kind}
    return list({one.kind: one for one in cluster.devices if one.kind in wanted}.values())


def _on_devices(
    cluster: Cluster, options: PlanOptions, count: int, like: Device | None = None
) -> Change:
    # As the command builds them, where it can: whole nodes, with the links of their size.
    shorthand = None if like else enlarge(cluster, count)
    larger = with_devices(cluster, count, like) if shorthand is None else shorthand[1]
    text = f"{len(larger.devices)} devices"
    if like is not None:
        text += f", the new ones {like.kind!r}"
    if shorthand is not None:
        is_counted = options.batch_size is None and options.objective != "latency"
        step = f", {options.num_microbatches} micro-batches" if is_counted else ""
        text += f" ({shorthand[0]}{step})"
    return Change(text, larger, options, MORE_DEVICES)


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


def _advice(remedies: Sequence[Remedy], asked: PlanOptions, constraint: str, tried: str) -> str:
    if remedies:
        return f"it would fit with {', or '.join(_in_words(entry, asked) for entry in remedies)}"
    return f"none {tried} helps" + "; use devices with more memory" * (constraint == "memory")


def _in_words(remedy: Remedy, asked: PlanOptions) -> str:
    if remedy.step_time_s is None:
        return remedy.text
    most = "" if remedy.is_settled else "at most "
    words = f"{remedy.text}: {most}{format_time(remedy.step_time_s)} per step"
    count, wanted = remedy.options.num_microbatches, asked.num_microbatches
    if remedy.options.batch_size is None and count != wanted:
        words += f" of {count / wanted:.3g} times the samples"
    return words
