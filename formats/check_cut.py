"""Judgement of a cut that somebody uses today: lost layers, memory, step time, and the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.cluster.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions
from ..core.profile.profile import Profile
from ..core.units import format_bytes, format_time
from ..planner.plan import plan
from ..planner.price_split import plan_from_balance
from ..planner.problem.input_checks import parse_cluster, require_options
from .target import ImportedCut

MOST_NAMED = 6


@dataclass(frozen=True)
class CutReport:
    """Verdict on a cut.

    Attributes:
        lost: Names of the layers in no stage.
        doubled: Names of the layers in several stages.
        plan: The cut with its times and memory; `None` if it cannot run.
        reason: Why it cannot run, with both numbers; empty if it can.
        unlimited: The cut with its times where only memory is in the way.
        best: The best plan of the same options; `None` if nothing fits.
    """

    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    plan: Plan | None
    reason: str
    unlimited: Plan | None
    best: Plan | None

    @property
    def slowdown(self) -> float | None:
        """Return by how much its step is longer than the best, as a fraction; `None` unpriced."""
        priced = self.plan or self.unlimited
        if priced is None or self.best is None or not self.best.step_time_s:
            return None
        return priced.step_time_s / self.best.step_time_s - 1

    def to_dict(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        priced = self.plan or self.unlimited
        return {
            "runs": self.plan is not None,
            "reason": self.reason,
            "lost": list(self.lost),
            "doubled": list(self.doubled),
            "balance": list(priced.balance) if priced else None,
            "step_time_s": priced.step_time_s if priced else None,
            "bubble_fraction": priced.bubble_fraction if priced else None,
            "peak_bytes": [stage.memory.total_bytes for stage in priced.stages] if priced else [],
            "best_balance": list(self.best.balance) if self.best else None,
            "best_step_time_s": self.best.step_time_s if self.best else None,
            "slowdown": self.slowdown,
        }

    def __str__(self) -> str:
        lines = []
        if self.lost:
            lines.append(f"lost: {_shorten(self.lost)} in no stage; the model would run without")
        if self.doubled:
            lines.append(f"doubled: {_shorten(self.doubled)} in several stages")
        if self.plan is None and not (self.lost or self.doubled):
            lines.append(f"cannot run: {self.reason}")
        priced = self.plan or self.unlimited
        if priced is not None:
            without = "" if self.plan else " if memory had no limit"
            lines += _describe_memory(priced)
            lines.append(
                f"step: {format_time(priced.step_time_s)}{without}, bubble "
                f"{priced.bubble_fraction:.1%}, {priced.num_stages} stages of "
                f"{_list_counts(priced)} layers"
            )
        if self.best is not None:
            slower = self.slowdown
            compared = "" if slower is None else f"; this cut is {max(0.0, slower):.1%} slower"
            lines.append(
                f"best: {format_time(self.best.step_time_s)}, {self.best.num_stages} stages of "
                f"{_list_counts(self.best)} layers{compared}"
            )
        return "\n".join(lines)


def check_cut(
    cut: ImportedCut,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    search: Callable[[Profile, Cluster, PlanOptions], Plan] = plan,
) -> CutReport:
    """Judge a cut on a model and a cluster, beside the best plan with the same options.

    What the cut's form says of its schedule, chunks, micro-batches and recomputation replaces the
    options.

    Raises:
        InvalidInput: The cut has layers where the profile allows no cut, or options are wrong.
    """
    cluster, options = parse_cluster(cluster), merge_options(cut, require_options(options))
    names = tuple(entry.layer.name for entry in profile.layers)
    lost = tuple(names[layer] for layer in cut.lost)
    doubled = tuple(names[layer] for layer in cut.doubled)
    priced = unlimited = best = None
    reason = ""
    if cut.is_ordered:
        try:
            priced = price_cut(cut, profile, cluster, options)
        except Infeasible as error:
            reason = str(error)
            unlimited = _price_without_limit(cut, profile, cluster, options)
    elif not (lost or doubled):
        reason = "stages that are empty, or not in the model's order, are not priced here"
    else:
        reason = "layers are missing or doubled"
    try:
        best = search(profile, cluster, options)
    except Infeasible as error:
        reason = reason if priced is not None else reason or str(error)
    if priced is not None and best is not None:
        best = min(best, priced, key=lambda each: each.step_time_s)
    return CutReport(lost, doubled, priced, reason, unlimited, best)


def merge_options(cut: ImportedCut, options: PlanOptions) -> PlanOptions:
    """Return the options with what the cut's own form says.

    Raises:
        InvalidInput: The form names a schedule that plans cannot have.
    """
    update: dict[str, object] = {}
    if cut.schedule is not None:
        update["schedule"] = cut.schedule
    elif cut.chunks > 1 and options.schedule in ("1f1b", "gpipe"):
        update["schedule"] = "interleaved_1f1b"
    if cut.chunks > 1:
        update["chunks"] = cut.chunks
    if cut.replicas:
        update["max_replicas"] = max(cut.replicas)
    if cut.num_microbatches is not None:
        update["num_microbatches"] = cut.num_microbatches
    if cut.recompute is not None:
        update["recompute"] = "never" if cut.recompute == "never" else "always"
    return PlanOptions.model_validate(options.model_copy(update=update).model_dump())


def price_cut(cut: ImportedCut, profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the plan of a cut.

    Raises:
        InvalidInput: It is not a pipeline of the model, or cuts where the profile allows none.
        Infeasible: It needs more memory or devices than there are.
    """
    return plan_from_balance(profile, cluster, options, cut.balance, replicas=cut.replicas)


def _price_without_limit(
    cut: ImportedCut, profile: Profile, cluster: Cluster, options: PlanOptions
) -> Plan | None:
    devices = tuple(device.model_copy(update={"memory_bytes": None}) for device in cluster.devices)
    try:
        return price_cut(cut, profile, cluster.model_copy(update={"devices": devices}), options)
    except (Infeasible, InvalidInput):
        return None


def _describe_memory(priced: Plan) -> list[str]:
    """Describe the device with the highest share of its memory in use."""
    limits = {
        device: stage.memory_limit_bytes for stage in priced.stages for device in stage.devices
    }
    held = priced.memory_by_device()
    device = max(held, key=lambda name: held[name] / (limits[name] or held[name] + 1))
    limit = limits[device]
    of = f" of {format_bytes(limit)}" if limit is not None else ""
    return [f"memory: at most {format_bytes(held[device])}{of}, on {device}"]


def _list_counts(priced: Plan) -> str:
    counts = ", ".join(map(str, priced.balance))
    return counts if len(counts) < 60 else f"{min(priced.balance)} to {max(priced.balance)}"


def _shorten(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
