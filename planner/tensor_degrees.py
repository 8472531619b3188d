"""Plans of each number of devices that split layers, strategy, and recomputed layers.

With tensor parallelism of degree t, groups of t devices stand for devices, and a layer costs what
it costs one device of a group (`problem.split_layers`). So the search for one degree is the search
for stages and replicas on the groups. Replicas share by one strategy in the whole plan, as one that
saves memory may cost time. Where degree or strategy is open, the best plan of each competes, and
the bound is the least of theirs. Layers that are activation checkpoints are costs of the profile,
too (`problem.layer_checkpoints`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, product
from typing import get_args

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.plan.assumptions import list_assumptions
from ..core.plan.plan import Baseline, Plan, PlanOptions, Sharing
from ..core.plan.schedule import TrainingSchedule
from ..core.profile.backward_parts import microbatch_s
from ..core.profile.profile import Profile
from ..core.units import count, format_time, list_some
from ..schedules.traits import SPLIT_BACKWARD
from .assemble import was_cut_short
from .cost.sharing import list_strategies
from .microbatch_size import rank_plan
from .problem.layer_checkpoints import (
    Span,
    check_checkpoints,
    checkpoint_costs,
    list_checkpoints,
)
from .problem.split_layers import (
    describe_split,
    find_split,
    group_devices,
    split_costs,
)

MOST_LEFT = 3
"""Devices left idle that a note names."""

Choice = tuple[int, tuple[Sharing, ...]]
"""Degree, and strategies by which replicas share."""

PlanDegree = Callable[["DegreeProblem", float], Plan]
"""Plans one problem until a deadline on the clock of `time.monotonic`."""


@dataclass(frozen=True)
class DegreeProblem:
    """Profiles and cluster as groups of ``degree`` devices see them.

    ``members`` has the devices of each group by the name of the first. ``checkpoints`` are the
    layers that run again in the backward, whose costs the profiles then include; ``options`` know
    nothing of that.
    """

    degree: int
    profiles: tuple[Profile, ...]
    cluster: Cluster
    options: PlanOptions
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checkpoints: tuple[Span, ...] | None = None

    @classmethod
    def of(
        cls, profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions, degree: int
    ) -> DegreeProblem:
        """Split the layers of the profiles, group the devices, and checkpoint layers if asked.

        Raises:
            InvalidInput: The profile or the cluster does not allow that degree, or the options no
                checkpoints of layers.
        """
        made = cls._split(profiles, cluster, options.model_copy(update={"tensor": degree}), degree)
        if options.recompute != "layers":
            return made
        check_checkpoints(options)
        asked = {"recompute": "never"}
        if options.objective == "latency":
            return replace(made, options=made.options.model_copy(update=asked), checkpoints=())
        spans = list_checkpoints(made.profiles[0])
        return replace(
            made,
            profiles=tuple(checkpoint_costs(profile, spans) for profile in made.profiles),
            options=made.options.model_copy(update=asked),
            checkpoints=spans,
        )

    @classmethod
    def _split(
        cls, profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions, degree: int
    ) -> DegreeProblem:
        if degree == 1:
            return cls(1, tuple(profiles), cluster, options)
        grouped, members = group_devices(cluster, degree)
        split = tuple(
            split_costs(profile, find_split(profile, degree), cluster) for profile in profiles
        )
        notes = (*describe_split(profiles[0], degree), *_describe_groups(cluster, members, degree))
        if len(grouped.devices) == 1:  # it has no links then, and collectives rest on links
            notes += tuple(list_assumptions(profiles[0], cluster))
        return cls(degree, split, grouped, options, members, notes)

    @property
    def choice(self) -> Choice:
        return self.degree, self.options.strategies

    @property
    def schedules(self) -> tuple[TrainingSchedule, ...]:
        """The schedules to choose among; empty for all."""
        if self.checkpoints is None:
            return ()
        return tuple(name for name in get_args(TrainingSchedule) if name not in SPLIT_BACKWARD)

    def least_step_s(self) -> float:
        """Bound the step of every plan by its work spread evenly over all groups."""
        if self.options.objective != "step_time" or self.options.batch_size is not None:
            return 0.0
        work_s = min(microbatch_s(self.profiles[0], splits=each)[0] for each in (False, True))
        speed = math.fsum(device.speed for device in self.cluster.devices)
        return self.options.num_microbatches * work_s / speed * (1 - 1e-9)

    def expand(self, plan: Plan, cluster: Cluster, profile_id: str) -> Plan:
        """Return a plan of groups as one of the devices in them."""
        if self.checkpoints is not None:
            plan = _name_checkpoints(plan, self.checkpoints, profile_id)
        if self.degree == 1:
            return plan

        def every(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(device for name in names for device in self.members[name])

        def move(baseline: Baseline) -> Baseline:
            devices = tuple(map(every, baseline.devices))
            return baseline.model_copy(update={"devices": devices})

        proof = plan.proof
        if plan.options.objective == "devices":
            scaled = {name: getattr(proof, name) * self.degree for name in ("value", "lower_bound")}
            proof = proof.model_copy(update=scaled)
        expanded = plan.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(
                        update={"devices": every(stage.devices), "tensor": self.degree}
                    )
                    for stage in plan.stages
                ),
                "baselines": tuple(map(move, plan.baselines)),
                "profile_id": profile_id,
                "proof": proof,
                "notes": (*plan.notes, *self.notes),
            }
        )
        return expanded.locate(cluster)

    def find_groups(
        self, cluster: Cluster, devices: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Return the groups that devices of stages form, by index; -1 for those that form none."""
        if self.degree == 1:
            return devices
        names = [device.name for device in cluster.devices]
        groups = {
            frozenset(self.members[group.name]): at for at, group in enumerate(self.cluster.devices)
        }
        return [
            [
                groups.get(frozenset(names[index] for index in held[at : at + self.degree]), -1)
                for at in range(0, len(held), self.degree)
            ]
            for held in devices
        ]

    def contract(self, plan: Plan) -> Plan:
        """Return a plan of devices as one of groups; the inverse of `expand`, but for proofs."""

        def heads(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(names[:: self.degree])

        return plan.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(
                        update={
                            "devices": heads(stage.devices),
                            "tensor": 1,
                            "recompute": stage.recompute if stage.recomputes_whole else "never",
                            "checkpoints": (),
                        }
                    )
                    for stage in plan.stages
                )
            }
        )


def _describe_groups(
    cluster: Cluster, members: Mapping[str, Sequence[str]], degree: int
) -> Iterator[str]:
    """Yield a note on the devices that are left over when others form groups."""
    grouped = {name for names in members.values() for name in names}
    left = [device.name for device in cluster.devices if device.name not in grouped]
    if left:
        yield (
            f"{count(len(left), 'device')} left idle, in no group of {degree} equal neighbours: "
            f"{list_some(left, MOST_LEFT)}"
        )


def _name_checkpoints(plan: Plan, checkpoints: Sequence[Span], profile_id: str) -> Plan:
    """Return the plan of a profile with checkpoints as one of the profile without."""
    stages = []
    for stage in plan.stages:
        end = stage.first_layer + stage.num_layers
        own = tuple(span for span in checkpoints if stage.first_layer <= span[0] < end)
        update = {"recompute": "layers" if own else "never", "checkpoints": own}
        stages.append(stage.model_copy(update=update))
    options = plan.options.model_copy(update={"recompute": "layers"})
    return plan.model_copy(
        update={"stages": tuple(stages), "options": options, "profile_id": profile_id}
    )


def list_choices(profiles: Sequence[Profile], options: PlanOptions) -> list[Choice]:
    """Return what to plan, the largest degree first: its groups are fewest, so it is quickest."""
    known = [{split.degree for split in profile.splits} for profile in profiles]
    degrees = (*sorted(set.intersection(*known), reverse=True), 1)
    if options.tensor != "auto":
        degrees = (options.tensor,)
    return list(product(degrees, list_strategies(options)))


@dataclass
class _Tried:
    """Plans by choice, and what is known of those without."""

    problems: dict[Choice, DegreeProblem] = field(default_factory=dict)
    plans: dict[Choice, Plan] = field(default_factory=dict)
    skipped: dict[Choice, str] = field(default_factory=dict)
    invalid: InvalidInput | None = None
    error: Infeasible | DeadlineExceeded | None = None
    is_open: bool = False


def plan_degrees(
    plan_degree: PlanDegree,
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    deadline: float,
) -> Plan:
    """Return the best plan of every degree and strategy that the options allow.

    Raises:
        InvalidInput: No degree is possible.
        Infeasible: None fits; the error is of the largest degree and ``fully_shard``.
        DeadlineExceeded: No plan was found in time.
    """
    tried = _Tried()
    choices = list_choices(profiles, options)
    for number, choice in enumerate(choices):
        degree, strategies = choice
        own = options.model_copy(update={"strategies": strategies})
        try:
            problem = DegreeProblem.of(profiles, cluster, own, degree)
        except InvalidInput as error:
            tried.invalid = tried.invalid or error
            tried.skipped[choice] = "not possible here"
            continue
        until = _share(deadline, len(choices) - number) if len(choices) > 1 else deadline
        _try_degree(tried, plan_degree, problem, until)
    if not tried.plans:
        reason = tried.error or tried.invalid
        assert reason is not None
        raise reason
    # Of equals, that of fewest devices to a layer, with whole copies.
    best = min(reversed(tried.plans), key=lambda choice: rank_plan(tried.plans[choice]))
    if len(choices) > 1 and deadline < math.inf:
        _plan_again(tried, plan_degree, tried.problems[best], deadline)
    made = _combine(tried, best)
    if options.tensor == "auto" and choices[0][0] == 1:
        note = "tensor=1: the profile names no layers that split over several devices"
        made = made.model_copy(update={"notes": (*made.notes, note)})
    return made


def _share(deadline: float, left: int) -> float:
    """Return the deadline of the next choice: of half the time left, an equal part."""
    now = time.monotonic()
    if deadline == math.inf:
        return deadline
    return now + max(0.0, deadline - now) / (2 * left)


def _plan_again(
    tried: _Tried, plan_degree: PlanDegree, problem: DegreeProblem, deadline: float
) -> None:
    """Give the best choice the rest of the time, if its search was cut short."""
    first = tried.plans[problem.choice]
    if not was_cut_short(first) or time.monotonic() > deadline:
        return
    try:
        again = plan_degree(problem, deadline)
    except DeadlineExceeded:
        return
    chosen = min(again, first, key=rank_plan)
    proofs = again.proof, first.proof
    tried.plans[problem.choice] = chosen.with_bounds(
        max(proof.lower_bound for proof in proofs),
        max(proof.simulated_lower_bound_s for proof in proofs),
    )


def _try_degree(
    tried: _Tried, plan_degree: PlanDegree, problem: DegreeProblem, deadline: float
) -> None:
    """Plan one problem, unless its bound says that it cannot be the best."""
    choice = problem.choice
    best_s = min((plan.step_time_s for plan in tried.plans.values()), default=math.inf)
    if problem.least_step_s() >= best_s:
        tried.skipped[choice] = f"at least {format_time(problem.least_step_s())}"
        return
    tried.problems[choice] = problem
    try:
        tried.plans[choice] = plan_degree(problem, deadline)
    except Infeasible as error:
        tried.error, tried.skipped[choice] = tried.error or error, "does not fit"
    except DeadlineExceeded as error:
        tried.error, tried.is_open = tried.error or error, True
        tried.skipped[choice] = "no time left"


def _combine(tried: _Tried, best: Choice) -> Plan:
    """Return the plan of one choice with a proof for all of them."""
    plan, proofs = tried.plans[best], [found.proof for found in tried.plans.values()]
    lower = 0.0 if tried.is_open else min(proof.lower_bound for proof in proofs)
    bound_s = 0.0 if tried.is_open else min(proof.simulated_lower_bound_s for proof in proofs)
    notes = (*plan.notes, *_describe(tried, best))
    return plan.with_bounds(lower, bound_s).model_copy(update={"notes": notes})


def _describe(tried: _Tried, best: Choice) -> Iterator[str]:
    """Yield a note on the other choices."""
    others = {
        **{choice: format_time(plan.step_time_s) for choice, plan in tried.plans.items()},
        **tried.skipped,
    }
    if len(others) == 1:
        return
    shown = [len(set(values)) > 1 for values in zip(*others, strict=True)]

    def name(choice: Choice) -> str:
        parts = f"tensor={choice[0]}", f"strategies={','.join(choice[1])}"
        return " with ".join(compress(parts, shown))

    listed = ", ".join(
        f"{name(choice)}: {others[choice]}" for choice in sorted(others.keys() - {best})
    )
    yield f"{name(best)} was chosen; the step with others is {listed}"
