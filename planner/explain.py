"""Why a plan takes as long as it does, and what would help."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.explanation import Alternative, Bound, Comparison, Explanation, Shares
from ..core.plan import Plan, PlanOptions
from ..core.profile import Profile
from ..core.units import format_time
from .constraints import allowed_positions
from .from_balance import plan_from_balance
from .heuristics import equal_layers, equal_parameters, pipedream_plan, torchgpipe_balance
from .plan import Planner
from .scaled import as_planned
from .simulate import StageTimes, step_time
from .ways_out import with_devices

NOTICEABLE = 0.01
"""Savings of memory below this share of the step do not make memory what binds."""

GIB = 2**30

UNCONSTRAINED = {"num_stages": None, "max_stages": None, "pins": ()}
"""Options that other splits need not keep."""


def explain(
    plan: Plan, profile: Profile, cluster: Cluster | str, *, deadline_s: float | None = None
) -> Explanation:
    """What bounds a plan's step, what each change of the request would buy, and what others do.

    Each change is planned by itself, for the step time, at the plan's micro-batch size and to the
    gap of the plan's options; so this takes several times as long as planning. Changes that leave
    the plan possible never make it slower. What the changes are measured against is the plan; if
    planning again beats it, as for a plan somebody chose, the first change says so.

    Args:
        plan: Of this profile and cluster; `validate` checks that.
        profile: Costs of the layers.
        cluster: Devices and links, or shorthand.
        deadline_s: For all plans together; later ones are quicker or missing then.

    Raises:
        InvalidInput: The cluster's shorthand cannot be read.
    """
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster)
    profile = as_planned(plan, profile)
    objective = "latency" if plan.options.objective == "latency" else "step_time"
    options = plan.options.model_copy(update={"batch_size": None, "objective": objective})
    study = _Study(plan, profile, cluster, options, Planner(profile), deadline_s)
    return study.explanation()


@dataclass
class _Change:
    """A request to plan and compare.

    Attributes:
        amount: How many units it buys.
        keeps_plan: Whether the plan explained answers it too, in no more time.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    unit: Literal["device", "GiB", ""] = ""
    amount: float = 0.0
    keeps_plan: bool = True


class _Study:
    """One plan and everything it is compared with."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        cluster: Cluster,
        options: PlanOptions,
        planner: Planner,
        deadline_s: float | None,
    ) -> None:
        self.plan, self.profile, self.cluster, self.options = plan, profile, cluster, options
        self.planner = planner
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        shape = profile.inputs[0].shape if profile.inputs else ()
        self.microbatch_size = shape[0] if shape and shape[0] else None
        self.samples = self.microbatch_size or 1

    def explanation(self) -> Explanation:
        plan = self.plan
        changes = list(_changes(plan, self.cluster, self.options))
        free = _without_limits(self.cluster)
        unlimited_s = None
        if free is not None:
            unlimited_s = self._step_s(_Change("", free, self.options), 1 / (len(changes) + 1))
        alternatives = [
            self._alternative(change, 1 / (len(changes) - place))
            for place, change in enumerate(changes)
        ]
        if alternatives and (alternatives[0].gain or 0) < 1e-3:
            alternatives = alternatives[1:]  # planning again finds nothing better
        shares, stage = _shares(plan)
        link, link_busy = _busiest_link(plan)
        memory_used = max(
            (
                entry.memory.total_bytes / entry.memory_limit_bytes
                for entry in plan.stages
                if entry.memory_limit_bytes
            ),
            default=None,
        )
        bound = _bound(plan, shares, unlimited_s)
        return Explanation(
            step_time_s=plan.step_time_s,
            microbatch_size=self.microbatch_size,
            time_per_sample_s=plan.step_time_s / (plan.num_microbatches * self.samples),
            bound=bound,
            reason=_reason(bound, plan, shares, stage, link, link_busy, unlimited_s),
            shares=shares,
            bubble=plan.bubble_fraction,
            busiest_stage=stage,
            busiest_link=link,
            link_busy=link_busy,
            memory_used=memory_used,
            unlimited_step_time_s=unlimited_s,
            alternatives=tuple(alternatives),
            comparisons=tuple(self._comparisons()),
        )

    def _step_s(self, change: _Change, share: float) -> float | None:
        """The best step found with this share of the time left."""
        left_s = None
        if self.deadline is not None:
            left_s = max(0.0, self.deadline - time.monotonic()) * share
        try:
            found = self.planner.plan(change.cluster, change.options, deadline_s=left_s)
        except Infeasible:
            return self.plan.step_time_s if change.keeps_plan else None
        except (InvalidInput, DeadlineExceeded):
            return None
        if change.keeps_plan:
            return min(found.step_time_s, self.plan.step_time_s)
        return found.step_time_s

    def _alternative(self, change: _Change, share: float) -> Alternative:
        step_s = self._step_s(change, share)
        is_forward = self.plan.schedule == "forward_only"
        count = 1 if is_forward else change.options.num_microbatches
        if step_s is None:
            return Alternative(text=change.text, num_microbatches=count)
        before_s = self.plan.step_time_s / (self.plan.num_microbatches * self.samples)
        after_s = step_s / (count * self.samples)
        saved_s = (before_s - after_s) * count * self.samples
        return Alternative(
            text=change.text,
            num_microbatches=count,
            step_time_s=step_s,
            time_per_sample_s=after_s,
            gain=1 - after_s / before_s if before_s else 0.0,
            unit=change.unit,
            saved_s_per_unit=saved_s / change.amount if change.amount else None,
        )

    def _comparisons(self) -> Iterator[Comparison]:
        """Others' splits into as many stages as the plan has or as there are devices."""
        profile, plan = self.profile, self.plan
        positions = allowed_positions(profile, self.options)
        most = min(len(self.cluster.devices), len(positions) - 1)
        if plan.schedule == "1f1b":
            most = min(most, plan.num_microbatches)
        counts = sorted({most, min(plan.num_stages, most)})
        work = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
        num_layers = len(profile.layers)
        for name, splits in (
            ("equal layers", [equal_layers(num_layers, count, positions) for count in counts]),
            ("equal parameters", [equal_parameters(profile, c, positions) for c in counts]),
            ("torchgpipe", [torchgpipe_balance(work, count, positions) for count in counts]),
        ):
            priced = [self._comparison(name, split) for split in splits]
            yield min(priced, key=lambda entry: entry.step_time_s or float("inf"))
        if self.cluster.levels:
            bandwidth = self.cluster.levels[-1].bandwidth_bytes_per_s
            devices = len(self.cluster.devices)
            found = pipedream_plan(profile, devices, bandwidth, positions)
            if found is not None:
                yield self._comparison("PipeDream", *found)

    def _comparison(
        self, name: str, balance: Sequence[int], replicas: Sequence[int] = ()
    ) -> Comparison:
        counts = tuple(replicas) or (1,) * len(balance)
        reason, step_s = "", None
        if min(balance) < 1:
            reason = "leaves a stage empty"
        else:
            asked = self.options.model_copy(update=UNCONSTRAINED)
            try:
                step_s = plan_from_balance(
                    self.profile, self.cluster, asked, balance, replicas=replicas
                ).step_time_s
            except Infeasible as error:
                reason = "does not fit" if error.constraint == "memory" else "cannot be placed"
            except InvalidInput:
                reason = "refused by the schedule"
        return Comparison(
            name=name,
            balance=tuple(balance),
            replicas=counts,
            step_time_s=step_s,
            ratio=step_s / self.plan.step_time_s if step_s and self.plan.step_time_s else None,
            reason=reason,
        )


def _changes(plan: Plan, cluster: Cluster, options: PlanOptions) -> Iterator[_Change]:
    yield _Change("planned again, nothing changed", cluster, options)
    yield _Change(
        "one more device", with_devices(cluster, len(cluster.devices) + 1), options, "device", 1
    )
    if len(cluster.devices) > 1:
        yield _Change("links twice as fast", _twice_as_fast(cluster), options)
    limited = [device.memory_bytes for device in cluster.devices if device.memory_bytes]
    if limited:
        more = _with_memory(cluster, 1.1)
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
    if options.max_replicas is not None:
        allowed = options.model_copy(update={"max_replicas": None})
        yield _Change("replicas allowed", cluster, allowed)


def _twice_as_fast(cluster: Cluster) -> Cluster:
    levels = tuple(
        level.model_copy(
            update={
                "bandwidth_bytes_per_s": 2 * level.bandwidth_bytes_per_s,
                "all_reduce_bandwidth_bytes_per_s": level.all_reduce_bandwidth_bytes_per_s
                and 2 * level.all_reduce_bandwidth_bytes_per_s,
            }
        )
        for level in cluster.levels
    )
    return cluster.model_copy(update={"levels": levels})


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    devices = tuple(
        device.model_copy(
            update={"memory_bytes": device.memory_bytes and int(device.memory_bytes * factor)}
        )
        for device in cluster.devices
    )
    return cluster.model_copy(update={"devices": devices})


def _without_limits(cluster: Cluster) -> Cluster | None:
    """The cluster with all the memory one could want; `None` if it has."""
    if all(device.memory_bytes is None for device in cluster.devices):
        return None
    devices = tuple(device.model_copy(update={"memory_bytes": None}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def _shares(plan: Plan) -> tuple[Shares, int]:
    """The parts of the step, and the stage that works longest."""
    whole_s = plan.step_time_s
    busy_s, stage = _busiest(plan)
    if not whole_s:
        return Shares(work=0, fill=0, links=0, gradients=0), stage
    no_sums_s = min(_simulated_s(plan, sums=False), whole_s)
    no_sends_s = min(_simulated_s(plan, sums=False, sends=False), no_sums_s)
    busy_s = min(busy_s, no_sends_s)
    return (
        Shares(
            work=busy_s / whole_s,
            fill=(no_sends_s - busy_s) / whole_s,
            links=(no_sums_s - no_sends_s) / whole_s,
            gradients=(whole_s - no_sums_s) / whole_s,
        ),
        stage,
    )


def _busiest(plan: Plan) -> tuple[float, int]:
    """How long the busiest device computes, and the largest of its stages."""
    work_s = [
        -(-plan.num_microbatches // stage.replicas) * (stage.forward_time_s + stage.backward_time_s)
        for stage in plan.stages
    ]
    if plan.schedule == "forward_only":
        work_s = [stage.forward_time_s for stage in plan.stages]
    on_device: dict[str, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        on_device[stage.devices[0]].append(index)
    busiest = max(on_device.values(), key=lambda held: sum(work_s[index] for index in held))
    return sum(work_s[index] for index in busiest), max(busiest, key=lambda index: work_s[index])


def _busiest_link(plan: Plan) -> tuple[int | None, float]:
    """The stage in front of the cut that sends longest, and the share of the step it does."""
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
    """The step with some of its communication taking no time."""
    stages = plan.stages
    times = StageTimes(
        forward_s=[stage.forward_time_s for stage in stages],
        backward_s=[stage.backward_time_s for stage in stages],
        send_forward_s=[stage.send_forward_time_s * sends for stage in stages[:-1]],
        send_backward_s=[stage.send_backward_time_s * sends for stage in stages[1:]],
        sync_s=[stage.sync_time_s * sums for stage in stages],
        tied_sync_s=plan.tied_sync_time_s * sums,
        forward_channel=plan.forward_channels,
        backward_channel=plan.backward_channels,
    )
    depths = [stage.in_flight for stage in stages] if plan.schedule == "1f1b" else ()
    replicas = [stage.replicas for stage in stages]
    return step_time(plan.schedule, times, plan.num_microbatches, replicas, depths, plan.chunks)[0]


def _bound(plan: Plan, shares: Shares, unlimited_s: float | None) -> Bound:
    if unlimited_s is not None and plan.step_time_s:
        saved = 1 - unlimited_s / plan.step_time_s
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
    stage: int,
    link: int | None,
    link_busy: float,
    unlimited_s: float | None,
) -> str:
    """What binds, with its numbers."""
    if bound == "work":
        return f"stage {stage} computes {shares.work:.1%} of it"
    if bound == "fill":
        return (
            f"filling, draining and waiting take {shares.fill:.1%} of it, with "
            f"{plan.num_microbatches} micro-batches over {plan.num_stages} stages"
        )
    if bound == "links":
        return (
            f"messages lengthen it by {shares.links:.1%}; the cut behind stage {link} sends "
            f"{link_busy:.1%} of the time"
        )
    if bound == "gradients":
        return f"summing gradients lengthens it by {shares.gradients:.1%}"
    return f"without memory limits it would be {format_time(unlimited_s or 0.0)}"
