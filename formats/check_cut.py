"""Judgement of a cut that somebody uses today: missing layers, memory, step time, and the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions, Remedy
from ..core.plan.table import describe_step
from ..core.profile.forward_only import for_serving
from ..core.profile.profile import Profile
from ..core.units import format_bytes, format_time, list_some
from ..planner.plan import plan
from ..planner.price_split import check_memory, plan_from_balance
from ..planner.problem.input_checks import parse_cluster, require_options, require_profile
from ..planner.remedies import keep_remedies
from .place_cut import PlacedCut, fill_devices, place_cut
from .plan_for import SAME, Search
from .runtimes.registry import import_cut
from .target import FORWARD_SCHEDULES, ImportedCut, Target

NOT_PRICED = "its step is not priced: {}; memory is checked with one micro-batch in flight"


@dataclass(frozen=True)
class CutReport:
    """Verdict on a cut.

    Attributes:
        missing: Names of the layers in no stage.
        duplicated: Names of the layers in several stages.
        plan: The cut with its times and memory; `None` if it cannot run, or is not priced.
        reasons: Why it cannot run, with both numbers; empty if it can.
        unlimited: The cut with its times where only memory, or a rule of the runtime, is in the
            way.
        best: The best plan of the same options; `None` if nothing fits, or none was found in time.
        best_reason: Why there is none.
        notes: Parts of the form that the numbers leave out.
        is_refused: Whether a rule of the runtime is in the way.
    """

    missing: tuple[str, ...]
    duplicated: tuple[str, ...]
    plan: Plan | None
    reasons: tuple[str, ...]
    unlimited: Plan | None
    best: Plan | None
    best_reason: str
    notes: tuple[str, ...]
    is_refused: bool = False

    @property
    def slowdown(self) -> float | None:
        """Return by how much its step is longer than the best, as a fraction; `None` unpriced.

        Of a cut that does not fit, it may be negative: its memory is counted as if it did.
        """
        priced = self.plan or self.unlimited
        if priced is None or self.best is None or not self.best.step_time_s:
            return None
        return priced.step_time_s / self.best.step_time_s - 1

    def to_dict(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        priced = self.plan or self.unlimited
        return {
            "runs": not self.reasons,
            "reason": "; ".join(self.reasons),
            "missing": list(self.missing),
            "duplicated": list(self.duplicated),
            "balance": list(priced.balance) if priced else None,
            "step_time_s": priced.step_time_s if priced else None,
            "bubble_fraction": priced.bubble_fraction if priced else None,
            "peak_bytes": [stage.memory.total_bytes for stage in priced.stages] if priced else [],
            "best_balance": list(self.best.balance) if self.best else None,
            "best_step_time_s": self.best.step_time_s if self.best else None,
            "best_reason": self.best_reason,
            "slowdown": self.slowdown,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"cannot run: {reason}" for reason in self.reasons]
        lines += [f"note: {note}" for note in self.notes]
        priced = self.plan or self.unlimited
        if priced is not None:
            without = "" if self.plan or self.is_refused else " if memory had no limit"
            lines += _describe_memory(priced)
            lines.append(
                f"step: {format_time(priced.step_time_s)}{without}, bubble "
                f"{priced.bubble_fraction:.1%}, {priced.num_stages} stages of "
                f"{_list_counts(priced)} layers ({describe_step(priced)})"
            )
        if self.best is None:
            lines.append(f"best: {self.best_reason}")
        else:
            lines.append(
                f"best: {format_time(self.best.step_time_s)}, {self.best.num_stages} stages of "
                f"{_list_counts(self.best)} layers{self._list_devices()}{self._compare()}"
            )
        return "\n".join(lines)

    def _list_devices(self) -> str:
        """List the best plan's devices where it takes kinds of devices in another order."""
        made = [each for each in (self.best, self.plan or self.unlimited) if each]
        devices, *others = ([name for each in one.stages for name in each.devices] for one in made)
        kinds = {tuple(name.partition(":")[0] for name in names) for names in (devices, *others)}
        return f" on {list_some(devices, 8)}" if len(kinds) > 1 else ""

    def _compare(self) -> str:
        if self.slowdown is None:
            return ""
        if self.plan is not None and self.slowdown < SAME:
            return "; this cut is the best" if self.slowdown <= 0 else "; this cut is as fast"
        if self.plan is not None:
            return f"; this cut is {self.slowdown:.1%} slower"
        word = "slower" if self.slowdown >= 0 else "faster"
        condition = "ran" if self.is_refused else "fitted"
        return f"; this cut would be {abs(self.slowdown):.1%} {word} if it {condition}"


def check(
    cut: str | Path,
    target: str | Target,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
) -> CutReport:
    """Read a cut in the form of another runtime, and judge it beside the best plan.

    Args:
        cut: The text, or a file with it.
        target: Name of the runtime, such as ``vllm``.
        profile: Costs of the model's layers.
        cluster: Devices and links, or shorthand.
        options: Further options; what the cut's form says replaces them.

    Raises:
        InvalidInput: The cut is not in the runtime's form, or something given is of another kind.
    """
    return check_cut(import_cut(cut, target, profile), profile, cluster, options)


def import_(
    cut: str | Path,
    target: str | Target,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
) -> Plan:
    """Read a cut in the form of another runtime, and return it as a plan; see `check`.

    Raises:
        InvalidInput: The cut is no pipeline of the model, or not in the runtime's form.
        Infeasible: It needs more memory or devices than there are.
    """
    return import_plan(import_cut(cut, target, profile), profile, cluster, options)


def check_cut(
    cut: ImportedCut,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    search: Search = plan,
) -> CutReport:
    """Judge a cut on a model and a cluster, beside the best plan with the same options.

    What the cut's form says of its schedule, chunks, micro-batches and recomputation replaces the
    options.

    Raises:
        InvalidInput: The cut has layers where the profile allows no cut, or options are wrong.
    """
    cut, profile = _fit_profile(cut, profile)
    cluster = parse_cluster(cluster)
    cut = fill_devices(cut, cluster)
    options = merge_options(cut, require_options(options), len(cluster.devices))
    names = tuple(entry.layer.name for entry in profile.layers)
    priced = unlimited = best = None
    best_reason, reasons = "", cut.describe_faults(names)
    placed = place_cut(cut, cluster, options)
    notes = placed.notes
    if not reasons:
        try:
            priced, unpriced = _price(placed, profile, cluster, options)
            notes += (NOT_PRICED.format(unpriced),) * bool(unpriced)
        except Infeasible as error:
            reasons = [str(error)]
            unlimited = _price_without_limit(placed, profile, cluster, options)
    try:
        best = search(profile, cluster, options)
    except Infeasible as error:
        kept = keep_remedies(error, options, partial(_keeps_form, options))
        best, best_reason = priced, f"nothing fits: {kept}" * (priced is None)
    except DeadlineExceeded as error:
        best_reason = str(error)
    if priced is not None and best is not None:
        best = min(best, priced, key=lambda each: each.step_time_s)
    refused = cut.check(priced) if priced is not None else ()
    if refused:
        priced, unlimited = None, priced
        reasons = [f"{each.reason} ({each.remedy})" for each in refused]
    return CutReport(
        tuple(names[layer] for layer in cut.missing),
        tuple(names[layer] for layer in cut.duplicated),
        priced,
        tuple(reasons),
        unlimited,
        best,
        best_reason,
        (
            *cluster.assumptions,
            *profile.notes,
            *_compare_microbatch(cut, profile),
            *cut.notes,
            *notes,
        ),
        bool(refused),
    )


def _keeps_form(asked: PlanOptions, remedy: Remedy) -> bool:
    """Return whether a remedy only changes devices and micro-batches, as every runtime can."""
    sizes = {"num_microbatches": asked.num_microbatches, "batch_size": asked.batch_size}
    return remedy.options.model_copy(update=sizes) == asked


def import_plan(
    cut: ImportedCut,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    search: Search = plan,
) -> Plan:
    """Return a cut as a plan, with the bounds that a search for the best plan proves.

    Raises:
        InvalidInput: The cut is no pipeline of the model; its missing layers are named.
        Infeasible: It needs more memory or devices than there are.
    """
    cut, profile = _fit_profile(cut, profile)
    cluster = parse_cluster(cluster)
    cut = fill_devices(cut, cluster)
    options = merge_options(cut, require_options(options), len(cluster.devices))
    priced = price_cut(cut, profile, cluster, options)
    try:
        best = search(profile, cluster, options)
    except (Infeasible, DeadlineExceeded):
        return priced
    bound = max(best.proof.lower_bound, priced.proof.lower_bound)
    proven = priced.with_bounds(bound, best.proof.simulated_lower_bound_s)
    return proven.model_copy(update={"notes": (*cut.notes, *priced.notes)})


def _compare_microbatch(cut: ImportedCut, profile: Profile) -> Iterator[str]:
    size, shape = cut.microbatch_size, profile.inputs[0].shape if profile.inputs else ()
    if size and shape and shape[0] != size:
        yield (
            f"your file has micro-batches of {size}, these costs are of {shape[0]}: estimate with "
            f"--microbatch {size}, or profile so"
        )


def _fit_profile(cut: ImportedCut, profile: Profile) -> tuple[ImportedCut, Profile]:
    """Return the cut with layers split as the profile knows, and the profile as its runtime runs.

    That of a runtime of inference is of forward passes alone.
    """
    if not isinstance(cut, ImportedCut):
        raise InvalidInput(
            f"the cut is of type {type(cut).__name__}; read it first: import_cut(cut, target, "
            "profile)"
        )
    profile = require_profile(profile)
    if cut.tensor not in (1, *(split.degree for split in profile.splits)):
        note = (
            f"layers split over {cut.tensor} devices are not read, since the profile does not say "
            f"how they split: priced is one device for each group of {cut.tensor}; estimate the "
            "model by name, or profile it again"
        )
        cut = replace(cut, tensor=1, ranks_per_device=cut.tensor, notes=(*cut.notes, note))
    if cut.inference:
        profile = for_serving(profile, last_position=cut.last_position)
    return cut, profile


def merge_options(cut: ImportedCut, options: PlanOptions, num_devices: int) -> PlanOptions:
    """Return the options with what the cut's own form says.

    Raises:
        InvalidInput: The form names a schedule that plans cannot have, or leaves open how its
            stages are dealt to the devices.
    """
    update: dict[str, object] = {"tensor": cut.tensor} if cut.tensor > 1 else {}
    chunks = cut.chunks
    if cut.inference and options.schedule not in FORWARD_SCHEDULES:
        raise InvalidInput(
            f"runtimes of inference have no schedule {options.schedule}; leave schedule="
            f"{FORWARD_SCHEDULES[0]!r}",
            field="/options/schedule",
        )
    groups = max(1, num_devices // cut.tensor)
    if cut.ranks_setting and len(cut.stages) > groups:
        chunks, rest = divmod(len(cut.stages), groups)
        if rest:
            raise InvalidInput(
                f"{len(cut.stages)} stages are no multiple of {groups} devices; give "
                f"{cut.ranks_setting} with the cut, or other devices"
            )
    if cut.schedule is not None:
        update["schedule"] = cut.schedule
    elif chunks > 1 and options.schedule in ("1f1b", "gpipe"):
        update["schedule"] = "interleaved_1f1b"
    if chunks > 1:
        update["chunks"] = chunks
    if cut.replicas:
        update["max_replicas"] = max(cut.replicas)
    if cut.num_microbatches is not None:
        update["num_microbatches"] = cut.num_microbatches
    if cut.recompute is not None:
        update["recompute"] = "always" if cut.recompute == "except_last" else cut.recompute
    return PlanOptions.model_validate(options.model_copy(update=update).model_dump())


def price_cut(cut: ImportedCut, profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the plan of a cut.

    Raises:
        InvalidInput: It is not a pipeline of the model, cuts where the profile allows none, or has
            stages that are not priced.
        Infeasible: It needs more memory or devices than there are.
    """
    if faults := cut.describe_faults([entry.layer.name for entry in profile.layers]):
        raise InvalidInput(
            f"the cut is not a pipeline of the model's {cut.num_layers} layers: {'; '.join(faults)}"
        )
    placed = place_cut(cut, cluster, options)
    made, unpriced = _price(placed, profile, cluster, options)
    if made is None:
        raise InvalidInput(f"the cut is no plan: {unpriced}; check judges its memory")
    return made


def _price(
    placed: PlacedCut, profile: Profile, cluster: Cluster, options: PlanOptions
) -> tuple[Plan | None, str]:
    """Return the plan of a cut, or why it has no price although it fits."""
    balance, devices, unpriced = placed.balance, placed.devices, placed.unpriced
    if not unpriced:
        try:
            return plan_from_balance(profile, cluster, options, balance, devices=devices), ""
        except InvalidInput as error:
            if error.field != "/devices":
                raise
            unpriced = str(error)

    def limit(index: int) -> float:
        return cluster.devices[index].memory_bytes or inf

    tightest = [min(held, key=limit, default=None) for held in devices]
    check_memory(profile, cluster, options, balance, tightest)
    return None, unpriced


def _price_without_limit(
    placed: PlacedCut, profile: Profile, cluster: Cluster, options: PlanOptions
) -> Plan | None:
    devices = tuple(device.model_copy(update={"memory_bytes": None}) for device in cluster.devices)
    try:
        return _price(placed, profile, cluster.model_copy(update={"devices": devices}), options)[0]
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
