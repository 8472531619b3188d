"""RuleComparison of a plan with published rules for the same profile and number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...core.cluster.cluster import Cluster
from ...core.plan.explanation import RuleComparison
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ..cost.assignment import Assignment, count_layers, place_stages, to_cuts
from ..cost.device_classes import Devices
from ..problem.problem import PlanningRequest
from .candidates import apply_recompute, data_parallel, one_device_a_stage, rejection_reason
from .published_rules import equal_layers, equal_parameters, pipedream_plan, torchgpipe_balance

UNCONSTRAINED = {"num_stages": None, "max_stages": None, "max_replicas": None, "pins": ()}
"""Options that published rules need not keep."""


def compare_rules(
    plan: Plan, profile: Profile, cluster: Cluster, options: PlanOptions
) -> Iterator[RuleComparison]:
    """Yield the results of equal layers, equal parameters, torchgpipe, data parallelism, PipeDream.

    The first three use the plan's stages with their replicas, or one device per stage, whichever
    is faster. All use as many devices as the plan, or the whole cluster if the plan has one device.
    """
    free = options.model_copy(update=UNCONSTRAINED)
    request = PlanningRequest(profile, cluster, free)
    own = _assignment(plan, request.devices)
    yield from _RuleComparison(request, own, plan.step_time_s, options.max_replicas).all()


@dataclass(frozen=True)
class _RuleComparison:
    """Published rules applied to the request of a plan."""

    request: PlanningRequest
    own: Assignment
    step_s: float
    max_replicas: int | None

    def all(self) -> Iterator[RuleComparison]:
        spread = one_device_a_stage(self.request, self.own) if self.own.chunks == 1 else None
        shapes = [self.own] if self.own.num_stages > 1 else []
        if spread is not None and spread.replicas != self.own.replicas:
            shapes.append(spread)
        if shapes:
            for name, rule in self._rules().items():
                found = [self._by(name, rule, shape) for shape in shapes]
                yield min(found, key=lambda entry: entry.step_time_s or float("inf"))
        copies = data_parallel(self.request, self.own)
        if copies is not None:
            yield self._priced("data parallel", copies)
        yield from self._pipedream(spread or self.own)

    def _rules(self) -> dict[str, Callable[[int], list[int]]]:
        """Return the rules that give layers per stage for a number of stages, by name."""
        profile, positions = self.request.profile, self.request.positions
        work = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
        return {
            "equal layers": lambda stages: equal_layers(len(work), stages, positions),
            "equal parameters": lambda stages: equal_parameters(profile, stages, positions),
            "torchgpipe": lambda stages: torchgpipe_balance(work, stages, positions),
        }

    def _by(self, name: str, rule: Callable[[int], list[int]], shape: Assignment) -> RuleComparison:
        return self._priced(name, replace(shape, cuts=to_cuts(rule(shape.num_stages))))

    def _pipedream(self, like: Assignment) -> Iterator[RuleComparison]:
        request, number = self.request, sum(like.replicas)
        levels = request.cluster.levels
        if not levels or number < 2 or like.chunks > 1 or len(set(like.classes)) > 1:
            return
        bandwidth = levels[-1].bandwidth_bytes_per_s
        found = pipedream_plan(request.profile, number, bandwidth, request.positions)
        if found is None:
            return
        counts, replicas = found
        split = place_stages(
            to_cuts(counts), replicas, request.devices, classes=like.classes[:1] * len(replicas)
        )
        if split is not None:
            yield self._priced("PipeDream", split)
            return
        yield RuleComparison(
            name="PipeDream",
            balance=tuple(counts),
            replicas=tuple(replicas),
            reason="a stage would neither lie inside one group of devices nor fill whole groups",
        )

    def _priced(self, name: str, split: Assignment) -> RuleComparison:
        cost_model, step_s, ratio = self.request.cost_model, None, None
        reason = "it leaves a stage empty" if 0 in count_layers(split.cuts) else ""
        if not reason:
            split = apply_recompute(cost_model, split)
            reason = rejection_reason(self.request, split)
        if not reason:
            step_s = cost_model.evaluate(split).step_time_s
            ratio = step_s / self.step_s if self.step_s else None
            if self.max_replicas is not None and max(split.replicas) > self.max_replicas:
                reason = f"more replicas than max_replicas={self.max_replicas} allows"
        return RuleComparison(
            name=name,
            balance=count_layers(split.cuts),
            replicas=split.replicas,
            step_time_s=step_s,
            ratio=ratio,
            reason=reason,
        )


def _assignment(plan: Plan, devices: Devices) -> Assignment:
    """Return a plan's choices as an assignment."""
    names = {device.name: index for index, device in enumerate(devices.cluster.devices)}
    place = {
        index: (number, rank)
        for number, entry in enumerate(devices.classes)
        for rank, index in enumerate(entry.devices)
    }
    last = [place[names[stage.devices[-1]]] for stage in plan.stages]
    return Assignment(
        cuts=to_cuts(plan.balance),
        replicas=tuple(stage.replicas for stage in plan.stages),
        classes=tuple(number for number, _ in last),
        ends=tuple(rank + 1 for _, rank in last),
        recompute=tuple(stage.recompute == "always" for stage in plan.stages),
        chunks=plan.chunks,
    )
