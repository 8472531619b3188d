"""Gain of each dimension of a plan: plans with less of one are compared with it part by part.

Dimensions are the devices that split layers, the replicas of stages, the strategy by which they
share parameters, and the stages. The parts of a step are those of `Shares`; the collectives of
split layers are taken out of the busiest device's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap

from ..core.cluster.cluster import Cluster
from ..core.plan.explanation import Dimension, Shares
from ..core.plan.plan import Plan, PlanOptions, Stage
from ..core.profile.profile import Profile
from ..core.units import count
from .problem.split_layers import collectives_s, find_split

Replan = Callable[[PlanOptions], Plan | None]
"""Plans the request with other options; `None` where nothing fits or time is over."""


@dataclass(frozen=True)
class BusyDevice:
    """The device that computes longest in a step, with the seconds of each of its stages."""

    name: str
    work_s: dict[int, float]

    @property
    def busy_s(self) -> float:
        return sum(self.work_s.values())

    @property
    def longest(self) -> int:
        """Return the stage on which the device spends most time."""
        return max(self.work_s, key=lambda stage: self.work_s[stage])

    def share(self, stage: int) -> float:
        """Return the share of the device's work that one of its stages is."""
        return self.work_s[stage] / self.busy_s if self.busy_s else 0.0


Parts = Callable[[Plan], tuple[Shares, BusyDevice]]
"""Splits a plan's step into shares, and names the device that computes longest."""


def find_busiest(plan: Plan) -> BusyDevice:
    """Return the device that computes longest in a step of the plan."""
    work_s: dict[str, dict[int, float]] = {}
    is_forward = plan.schedule == "forward_only"
    for index, stage in enumerate(plan.stages):
        each_s = stage.forward_time_s + (0.0 if is_forward else stage.backward_time_s)
        for place, name in enumerate(stage.devices):
            runs = count_runs(plan, stage, place // stage.tensor)
            work_s.setdefault(name, {})[index] = runs * each_s
    return max(starmap(BusyDevice, work_s.items()), key=lambda device: device.busy_s)


def count_runs(plan: Plan, stage: Stage, replica: int = 0) -> int:
    """Return how many micro-batches of a step a replica of a stage runs."""
    whole = 1 if plan.schedule == "forward_only" else plan.num_microbatches
    return max(0, -((replica - whole) // stage.replicas))


@dataclass(frozen=True)
class _Less:
    """Options with less of one dimension, and how the comparison is called."""

    text: str
    options: PlanOptions


def list_dimensions(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    replan: Replan,
    parts: Parts,
) -> Iterator[Dimension]:
    """Yield a comparison for each dimension of the plan."""
    for less in _list_less(plan, profile, options):
        other = replan(less.options)
        yield _compare(less.text, plan, other, profile, cluster, parts)


def _list_less(plan: Plan, profile: Profile, options: PlanOptions) -> Iterator[_Less]:
    tensor = plan.stages[0].tensor
    if tensor > 1:
        known = {1, *(split.degree for split in profile.splits)}
        fewer = max(degree for degree in known if degree < tensor)
        # Fewer devices to a layer leave more for stages, and another schedule may suit those.
        update = {"tensor": fewer, "num_stages": None, "auto": ("schedule", "chunks")}
        yield _Less(f"tensor {tensor} instead of {fewer}", options.model_copy(update=update))
    replicas = max(stage.replicas for stage in plan.stages)
    if replicas > 1:
        fewer = replicas // 2
        update = {"max_replicas": fewer}
        text = f"up to {replicas} replicas instead of {fewer}"
        yield _Less(text, options.model_copy(update=update))
    shared = {stage.strategy for stage in plan.stages} - {"single", "replicate"}
    if shared:
        text = f"{shared.pop()} instead of replicate"
        yield _Less(text, options.model_copy(update={"strategies": ("replicate",)}))
    if plan.num_stages > plan.chunks and options.num_stages is None:
        fewer = max(plan.chunks, plan.num_stages // 2 // plan.chunks * plan.chunks)
        text = f"{plan.num_stages} stages instead of up to {fewer}"
        yield _Less(text, options.model_copy(update={"max_stages": fewer}))


def _compare(
    text: str, plan: Plan, other: Plan | None, profile: Profile, cluster: Cluster, parts: Parts
) -> Dimension:
    if other is None:
        return Dimension(text=text)
    own, before = (_list_parts(each, profile, cluster, parts) for each in (plan, other))
    changes = [one - two for one, two in zip(own, before, strict=True)]
    most = [max(each.memory_by_device().values()) for each in (plan, other)]
    return Dimension(
        text=text + _describe_other(plan, other),
        step_time_s=other.step_time_s,
        compute_s=changes[0],
        all_reduce_s=changes[1],
        waiting_s=changes[2],
        messages_s=changes[3],
        gradients_s=changes[4],
        memory_bytes=most[0] - most[1],
    )


def _describe_other(plan: Plan, other: Plan) -> str:
    """Return in brackets how a plan with less is laid out, where the plan's layout is another."""
    used = [
        len({name for stage in each.stages for name in stage.devices}) for each in (plan, other)
    ]
    found = [count(other.num_stages, "stage")] * (other.num_stages != plan.num_stages)
    found += [other.schedule] * (other.schedule != plan.schedule)
    found += [count(used[1], "device")] * (used[1] != used[0])
    return f" (then {', '.join(found)})" if found else ""


def _list_parts(plan: Plan, profile: Profile, cluster: Cluster, parts: Parts) -> tuple[float, ...]:
    """Return the seconds of a step that compute, reduce, wait, send and sum gradients."""
    shares, busiest = parts(plan)
    whole_s, reduced_s = plan.step_time_s, 0.0
    for stage in map(plan.stages.__getitem__, busiest.work_s if plan.stages[0].tensor > 1 else ()):
        split, link = find_split(profile, stage.tensor), cluster.levels[0]
        again = 1 if stage.recompute == "never" else 2
        for own in split.layers[stage.first_layer : stage.first_layer + stage.num_layers]:
            forward_s, backward_s = collectives_s(own, stage.tensor, link)
            reduced_s += (forward_s * again + backward_s) * count_runs(plan, stage)
    reduced_s = min(reduced_s, shares.work * whole_s)
    return (
        shares.work * whole_s - reduced_s,
        reduced_s,
        shares.fill * whole_s,
        shares.links * whole_s,
        shares.gradients * whole_s,
    )
