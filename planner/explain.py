"""Explanation of a plan's step time: what bounds it, and what would shorten it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput, PlanMismatch
from ..core.plan.explanation import Alternative, Bound, Explanation, Shares
from ..core.plan.plan import Plan, PlanOptions
from ..core.profile.profile import Profile
from ..core.units import count, format_time
from .choose_options import rank_schedules
from .dimensions import BusyDevice, find_busiest, list_dimensions
from .heuristics.comparisons import compare_rules
from .plan import Planner
from .problem.input_checks import (
    compute_deadline,
    parse_cluster,
    require_plan,
    require_profile,
    scale_to_plan,
)
from .problem.layer_checkpoints import may_checkpoint
from .remedies import with_devices
from .search.branch_and_bound import ROUNDING
from .simulator.plan_timeline import times_of
from .simulator.simulate import step_time
from .tensor_degrees import DegreeProblem
from .validation.validate import validate

MAX_SCHEDULES = 3
"""Other schedules that are planned, the fastest by quick plans."""

NOTICEABLE = 0.01
"""Share of the step that unlimited memory must save for memory to count as the bound."""

GIB = 2**30


def explain(
    plan: Plan, profile: Profile, cluster: Cluster | str, *, deadline_s: float | None = None
) -> Explanation:
    """Explain what bounds a plan's step and what each change of the request would gain.

    Each change is planned separately, for the step time, at the plan's micro-batch size and to the
    gap of the plan's options, so this takes several times as long as planning. Changes under which
    the plan stays possible never make it slower. Gains are relative to the plan. If planning again
    beats it, as for a hand-chosen plan or another objective, the first change says so, and memory,
    devices and GiB are credited only with what they save beyond that.

    Args:
        plan: Plan of this profile and cluster; `validate` checks that.
        profile: Costs of the layers; of several profiles, the one that the plan names.
        cluster: Devices and links, or shorthand.
        deadline_s: Time for all plans together. Results of searches that were cut short are not
            `Alternative.proven`, and later ones may be missing.

    Raises:
        InvalidInput: The plan is not of this profile and cluster, or the shorthand is malformed.
    """
    plan, profile, cluster = require_plan(plan), require_profile(profile), parse_cluster(cluster)
    deadline = compute_deadline(deadline_s)
    check_own(plan, profile, cluster)
    profile = scale_to_plan(plan, profile)
    objective = "latency" if plan.options.objective == "latency" else "step_time"
    options = plan.options.model_copy(update={"batch_size": None, "objective": objective})
    study = _Study(plan, profile, cluster, options, Planner(profile), deadline)
    return study.explanation()


def check_own(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Check that a plan is of this profile and cluster."""
    profile_id = profile.content_id()
    if plan.profile_id != profile_id:
        raise InvalidInput(
            f"the plan was made from the profile {plan.profile_id or '(not named)'} of "
            f"{plan.model!r}, not from {profile_id} of {profile.model!r}; give the plan's own "
            "profile",
            field="/profile",
        )
    found, expected = len(cluster.devices), plan.cluster_devices
    if expected not in (0, found):
        raise InvalidInput(
            f"the plan was made for {expected} devices ({plan.stages[0].devices[0]!r} and others), "
            f"not for {found} ({cluster.devices[0].name!r} and others); give the plan's own "
            "cluster",
            field="/cluster",
        )
    try:
        validate(plan, profile, cluster)
    except PlanMismatch as error:
        raise InvalidInput(
            f"plan, profile and cluster do not match, or the plan was edited: {error}",
            field="/cluster",
        ) from None


@dataclass
class _Change:
    """Changed request to plan and compare.

    It adds ``amount`` units of a resource; where it keeps the plan, the explained plan stays
    possible with at most its step.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    unit: Literal["device", "GiB", ""] = ""
    amount: float = 0.0
    keeps_plan: bool = True


class _Study:
    """A plan with everything it is compared with."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        cluster: Cluster,
        options: PlanOptions,
        planner: Planner,
        deadline: float,
    ) -> None:
        self.plan, self.profile, self.cluster, self.options = plan, profile, cluster, options
        self.planner = planner
        self.deadline = deadline
        shape = profile.inputs[0].shape if profile.inputs else ()
        self.microbatch_size = shape[0] if shape and shape[0] else None
        self.samples = self.microbatch_size or 1
        self.least_s = plan.step_time_s  # least known step of the unchanged request
        degree = plan.stages[0].tensor
        self.groups = DegreeProblem.of((profile,), cluster, options, degree)

    def _schedules(self) -> list[_Change]:
        """Return the fastest other schedules as changes."""
        if self.plan.schedule == "forward_only" or self.options.objective != "step_time":
            return []
        groups = self.groups
        update = {"max_extra_in_flight": 0}
        options = self.options.model_copy(update=update)
        is_own = groups.profiles[0] is self.profile
        planner = self.planner if is_own else Planner(groups.profiles)
        ranked = rank_schedules(
            groups.profiles[0],
            groups.cluster,
            groups.options.model_copy(update=update),
            planner.tables,
            groups.schedules,
        )
        return [
            _Change(
                f"schedule {name}",
                self.cluster,
                options.model_copy(update={"schedule": name}),
                keeps_plan=False,
            )
            for name in [name for name in ranked if name != self.plan.schedule][:MAX_SCHEDULES]
        ]

    def explanation(self) -> Explanation:
        plan = self.plan
        changes = [*_changes(plan, self.cluster, self.options), *self._schedules()]
        is_limited = any(device.memory_bytes is not None for device in self.cluster.devices)
        # Planning again comes first, as later gains are measured from its result.
        alternatives = [self._alternative(changes[0], 1 / (len(changes) + 1))]
        self.least_s = min(self.least_s, alternatives[0].step_time_s or self.least_s)
        unlimited_s, is_proven = None, False
        if is_limited:
            unlimited = _Change("", _change_memory(self.cluster, None), self.options)
            unlimited_s, is_proven = self._step_s(unlimited, 1 / len(changes))
        alternatives += [
            self._alternative(change, 1 / (len(changes) - place + 1))
            for place, change in enumerate(changes[1:], start=1)
        ]
        dimensions = list_dimensions(
            plan, self.profile, self.cluster, self.options, self._replan, _shares
        )
        if (alternatives[0].gain or 0) < 1e-3:
            alternatives = alternatives[1:]  # planning again finds nothing better
        shares, busiest = _shares(plan)
        link, link_busy = _busiest_link(plan)
        bound = _bound(plan, shares, self.least_s, unlimited_s)
        return Explanation(
            step_time_s=plan.step_time_s,
            num_microbatches=plan.num_microbatches,
            microbatch_size=self.microbatch_size,
            time_per_sample_s=plan.step_time_s / (plan.num_microbatches * self.samples),
            bound=bound,
            reason=_reason(bound, plan, shares, busiest, link, link_busy, unlimited_s, is_proven),
            shares=shares,
            bubble=plan.bubble_fraction,
            busiest_device=busiest.name,
            busiest_stage=busiest.longest,
            busiest_stage_work=busiest.share(busiest.longest) * shares.work,
            busiest_link=link,
            link_busy=link_busy,
            memory_used=_memory_used(plan),
            unlimited_step_time_s=unlimited_s,
            unlimited_proven=is_proven,
            alternatives=tuple(alternatives),
            dimensions=tuple(dimensions),
            comparisons=tuple(
                compare_rules(
                    self.groups.contract(plan),
                    self.groups.profiles[0],
                    self.groups.cluster,
                    self.groups.options,
                )
            ),
        )

    def _step_s(self, change: _Change, share: float) -> tuple[float | None, bool]:
        """Return the best step found in a share of the time left, and if the search finished."""
        own_s = self.least_s if change.keeps_plan else None
        left_s = max(0.0, self.deadline - time.monotonic()) * share
        try:
            found = self.planner.plan(change.cluster, change.options, deadline_s=left_s)
        except InvalidInput:
            return None, False
        except (Infeasible, DeadlineExceeded):
            return own_s, False
        is_proven = found.proof.gap <= max(change.options.gap, ROUNDING)
        return min(found.step_time_s, own_s or found.step_time_s), is_proven

    def _replan(self, options: PlanOptions) -> Plan | None:
        """Plan with other options in half of the time left; `None` if there is no plan."""
        left_s = max(0.0, self.deadline - time.monotonic()) / 2
        try:
            return self.planner.plan(self.cluster, options, deadline_s=left_s)
        except (InvalidInput, Infeasible, DeadlineExceeded):
            return None

    def _alternative(self, change: _Change, share: float) -> Alternative:
        step_s, is_proven = self._step_s(change, share)
        is_forward = self.plan.schedule == "forward_only"
        count = 1 if is_forward else change.options.num_microbatches
        if step_s is None:
            return Alternative(text=change.text, num_microbatches=count)
        before_s = self.plan.step_time_s / (self.plan.num_microbatches * self.samples)
        after_s = step_s / (count * self.samples)
        saved_s = self.least_s - step_s  # beyond the gain of planning again
        return Alternative(
            text=change.text,
            num_microbatches=count,
            step_time_s=step_s,
            time_per_sample_s=after_s,
            gain=1 - after_s / before_s if before_s else 0.0,
            proven=is_proven,
            unit=change.unit,
            saved_s_per_unit=saved_s / change.amount if change.amount else None,
        )


def _changes(plan: Plan, cluster: Cluster, options: PlanOptions) -> Iterator[_Change]:
    yield _Change("planned again, for the least step", cluster, options)
    added = plan.stages[0].tensor
    yield _Change(
        "one more device" if added == 1 else f"{added} more devices",
        with_devices(cluster, len(cluster.devices) + added),
        options,
        "device",
        added,
    )
    if len(cluster.devices) > 1:
        yield _Change("links twice as fast", _twice_as_fast(cluster), options)
    limited = [device.memory_bytes for device in cluster.devices if device.memory_bytes]
    if limited:
        more = _change_memory(cluster, 1.1)
        added = sum(device.memory_bytes or 0 for device in more.devices) - sum(limited)
        yield _Change("10 % more memory", more, options, "GiB", added / GIB)
    if plan.schedule == "forward_only":
        return
    twice = 2 * options.num_microbatches
    if twice <= 2**20:
        yield _Change(
            "twice the micro-batches",
            cluster,
            options.model_copy(update={"num_microbatches": twice}),
            keeps_plan=False,
        )
    if options.recompute == "never":
        allowed = options.model_copy(update={"recompute": "auto"})
        yield _Change("recomputation allowed", cluster, allowed)
    if limited and may_checkpoint(options):
        allowed = options.model_copy(update={"recompute": "layers"})
        yield _Change("recomputation layer by layer", cluster, allowed, keeps_plan=False)
    if options.max_replicas is not None:
        allowed = options.model_copy(update={"max_replicas": None})
        yield _Change("replicas allowed", cluster, allowed)
    if options.regular != "no":
        allowed = options.model_copy(update={"regular": "no", "regular_within": None})
        yield _Change("irregular plans allowed (no regular)", cluster, allowed)
    if options.cut_at == "blocks":
        allowed = options.model_copy(update={"cut_at": "layers"})
        yield _Change("cuts inside blocks allowed (no cut_at)", cluster, allowed)


def _twice_as_fast(cluster: Cluster) -> Cluster:
    levels = tuple(level.scale(bandwidth_factor=2) for level in cluster.levels)
    links = tuple(link.scale(bandwidth_factor=2) for link in cluster.links)
    return cluster.model_copy(update={"levels": levels, "links": links})


def _change_memory(cluster: Cluster, factor: float | None) -> Cluster:
    """Return the cluster with its memory times ``factor``, or without limits for `None`."""

    def change(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None or factor is None else int(memory_bytes * factor)

    devices = tuple(
        device.model_copy(update={"memory_bytes": change(device.memory_bytes)})
        for device in cluster.devices
    )
    return cluster.model_copy(update={"devices": devices})


def _shares(plan: Plan) -> tuple[Shares, BusyDevice]:
    """Return the parts of the step, and the device that computes longest."""
    # Simulated with less and less communication; each difference is the share of what was removed.
    whole_s = plan.step_time_s
    busiest = find_busiest(plan)
    if not whole_s:
        return Shares(work=0, fill=0, links=0, gradients=0), busiest
    no_sums_s = min(_simulated_s(plan, sums=False), whole_s)
    no_sends_s = min(_simulated_s(plan, sums=False, sends=False), no_sums_s)
    busy_s = min(busiest.busy_s, no_sends_s)
    shares = Shares(
        work=busy_s / whole_s,
        fill=(no_sends_s - busy_s) / whole_s,
        links=(no_sums_s - no_sends_s) / whole_s,
        gradients=(whole_s - no_sums_s) / whole_s,
    )
    return shares, busiest


def _memory_used(plan: Plan) -> float | None:
    """Return the largest share of its limit that a device needs for all of its stages."""
    used: dict[str, float] = {}
    for stage in plan.stages:
        if stage.memory_limit_bytes:
            for device in stage.devices:
                share = stage.memory.total_bytes / stage.memory_limit_bytes
                used[device] = used.get(device, 0.0) + share
    return max(used.values(), default=None)


def _busiest_link(plan: Plan) -> tuple[int | None, float]:
    """Return the stage before the cut that sends longest, and that cut's share of the step."""
    sending_s = [
        -(-plan.num_microbatches // max(stage.replicas, behind.replicas))
        * (stage.send_forward_time_s + behind.send_backward_time_s)
        for stage, behind in zip(plan.stages, plan.stages[1:], strict=False)
    ]
    if not sending_s or not plan.step_time_s:
        return None, 0.0
    longest_s = max(sending_s)
    return sending_s.index(longest_s), longest_s / plan.step_time_s


def _simulated_s(plan: Plan, *, sums: bool = True, sends: bool = True) -> float:
    """Return the simulated step with gradient sums or messages taking no time."""
    stages = plan.stages
    # Backward times hold the recomputation: these orders have no `R` to which it would be moved.
    times = replace(times_of(plan), recompute_s=())
    if not sums:
        times = replace(times, sync_s=(), tied_sync_s=0.0)
    if not sends:
        times = replace(times, send_forward_s=(), send_backward_s=(), skips=())
    depths = [stage.in_flight for stage in stages] if plan.schedule == "1f1b" else ()
    replicas = [stage.replicas for stage in stages]
    return step_time(plan.schedule, times, plan.num_microbatches, replicas, depths, plan.chunks)[0]


def _bound(plan: Plan, shares: Shares, least_s: float, unlimited_s: float | None) -> Bound:
    if unlimited_s is not None and plan.step_time_s:
        saved = (least_s - unlimited_s) / plan.step_time_s
        if saved > max(NOTICEABLE, shares.links, shares.gradients):
            return "memory"
    parts: dict[Bound, float] = {
        "work": shares.work,
        "fill": shares.fill,
        "links": shares.links,
        "gradients": shares.gradients,
    }
    return max(parts, key=lambda name: parts[name])


def _reason(
    bound: Bound,
    plan: Plan,
    shares: Shares,
    busiest: BusyDevice,
    link: int | None,
    link_busy: float,
    unlimited_s: float | None,
    is_proven: bool,
) -> str:
    """Describe the bound with its numbers."""
    if bound == "work":
        return f"device {busiest.name!r} computes for {shares.work:.1%} of it" + (
            f", {busiest.share(busiest.longest) * shares.work:.1%} in stage {busiest.longest}, the "
            f"longest of its {len(busiest.work_s)}"
        ) * (len(busiest.work_s) > 1)
    if bound == "fill":
        return (
            f"filling, draining and waiting take {shares.fill:.1%} of it, with "
            f"{count(plan.num_microbatches, 'micro-batch')} over {count(plan.num_stages, 'stage')}"
        )
    if bound == "links":
        return (
            f"messages lengthen it by {shares.links:.1%}; the cut after stage {link} sends "
            f"{link_busy:.1%} of the time"
        )
    if bound == "gradients":
        return f"summing gradients lengthens it by {shares.gradients:.1%}"
    most = "" if is_proven else "at most "
    return f"without memory limits it would be {most}{format_time(unlimited_s or 0.0)}"
