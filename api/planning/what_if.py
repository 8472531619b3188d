"""What-if questions: price a given split, compare stored plans. Nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from ...core.cluster.cluster import Cluster
from ...core.document import LongTuple, NonEmptyTuple, Record
from ...core.errors import Infeasible, InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...core.service.documents import ComparedPlan, StoredPlan, to_infeasible_answer
from ...core.service.documents import Comparison as Comparison
from ...core.service.documents import Simulation as Simulation
from ...planner.price_split import plan_from_balance
from ...planner.problem.input_checks import scale_to_plan
from ...planner.simulator.plan_timeline import plan_timeline
from ...planner.validation.validate import as_ordered
from .requests import ClusterInput

Count = Annotated[int, Field(ge=1, le=2**20)]


class SimulationRequest(Record):
    """Request to price a split; nothing is searched and nothing is stored.

    Attributes:
        plan_id: A stored plan, whose profile, cluster, options and split are the defaults of the
            other fields.
        profile_id: A stored profile instead.
        profile: A profile instead.
        balance: Layers of each stage.
        replicas: Devices of each stage; one each if empty.
        cluster: The devices.
        options: What to plan for.
        timeline: Whether the response includes the start and end of every action.
    """

    plan_id: str | None = Field(None, max_length=80)
    profile_id: str | None = Field(None, max_length=80)
    profile: Profile | None = None
    balance: NonEmptyTuple[Count] | None = Field(None, max_length=4096)
    replicas: LongTuple[Count] | None = Field(None, max_length=4096)
    cluster: ClusterInput | None = None
    options: PlanOptions | None = None
    timeline: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ("plan_id", "profile_id", "profile")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidInput(
                "give exactly one of 'plan_id', 'profile_id' and 'profile'; found "
                + (" and ".join(map(repr, given)) or "none"),
                field=f"/{given[-1] if given else 'plan_id'}",
            )
        if self.plan_id is None:
            for name in ("balance", "cluster"):
                if getattr(self, name) is None:
                    raise InvalidInput(f"give a {name!r}, since no plan is named", field=f"/{name}")
        if self.replicas is not None and self.balance is None:
            raise InvalidInput("'replicas' needs a 'balance'; give both", field="/balance")
        return self


@dataclass(frozen=True)
class PricedSplit:
    """A split with everything that its price depends on.

    Attributes:
        base: The plan that is changed; `None` for a split of a profile.
        profile: The layers as they were profiled.
        balance: Layers of each stage.
        replicas: Devices of each stage; one each if empty.
    """

    base: Plan | None
    profile: Profile
    cluster: Cluster
    options: PlanOptions
    balance: tuple[int, ...]
    replicas: tuple[int, ...]


def price(split: PricedSplit, with_timeline: bool) -> Simulation:
    """Price a split, of a changed plan in its order and at its micro-batch size.

    The function's name is a label of the metrics.

    Raises:
        InvalidInput: It is no split of those layers.
    """
    base, layers, options = split.base, split.profile, split.options
    # The profile is as it was stored. Where the plan chose a micro-batch size or reordered layers,
    # the split is priced on the layers as planned, without asking for that choice again, and the
    # result states the options that were asked for.
    asked = options
    order: tuple[int, ...] = ()
    is_sized = False
    profile_id: str | None = None
    if base is not None:
        batch_size = base.options.batch_size
        is_sized = batch_size is not None and asked.batch_size == batch_size
        if is_sized:
            layers = scale_to_plan(base, layers)
            options = options.model_copy(update={"num_microbatches": base.num_microbatches})
            asked = options.model_copy(update={"batch_size": None})
        order = base.layer_order if asked.layer_order == "any" else ()
        if order:
            layers = as_ordered(base, layers)
        # Several profiles were given for a batch size that now differs: none of them is the plan's.
        if is_sized or order or batch_size is None:
            profile_id = base.profile_id
    try:
        plan = plan_from_balance(
            layers,
            split.cluster,
            asked,
            split.balance,
            replicas=split.replicas,
            profile_id=profile_id,
        )
    except Infeasible as error:
        return Simulation(status="infeasible", infeasible=to_infeasible_answer(error))
    timeline = plan_timeline(plan) if with_timeline else None
    if is_sized or order:
        named = {name: getattr(plan.options, name) for name in ("precision", "reserves")}
        options = options.model_copy(update=named)
        plan = plan.model_copy(update={"options": options, "layer_order": order})
    return Simulation(status="simulated", plan=plan, timeline=timeline)


class ComparisonRequest(Record):
    """Request to compare stored plans.

    Attributes:
        plan_ids: Two to eight distinct plans.
    """

    plan_ids: tuple[Annotated[str, Field(max_length=80)], ...] = Field(min_length=2, max_length=8)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.plan_ids)) != len(self.plan_ids):
            raise InvalidInput("name each plan only once", field="/plan_ids")
        return self


def compare(records: tuple[StoredPlan, ...]) -> Comparison:
    """Compare plans and name the fastest."""
    planned = {record.id: record.plan for record in records if record.plan is not None}
    # Plans may differ in batch size; then only the throughput compares them.
    rates = {name: plan.samples_per_s for name, plan in planned.items()}
    times_s = {
        name: 1 / rate if rate and all(rates.values()) else planned[name].step_time_s
        for name, rate in rates.items()
    }
    slowest_s = max(times_s.values(), default=0.0)
    return Comparison(
        plans=tuple(
            _compared(record, times_s.get(record.id, 0.0) / slowest_s if slowest_s else 1.0)
            for record in records
        ),
        fastest=min(times_s, key=lambda name: times_s[name], default=None),
        same_profile=all(records[0].profile_id == one.profile_id for one in records),
    )


def _compared(record: StoredPlan, times_slowest: float) -> ComparedPlan:
    plan = record.plan
    common = {
        "id": record.id,
        "status": record.status,
        "profile_id": record.profile_id,
        "num_devices": len(record.cluster.devices),
        "schedule": record.options.schedule,
    }
    if plan is None:
        assert record.infeasible is not None, "a record has a plan or a reason"
        return ComparedPlan.model_validate({**common, "message": record.infeasible.message})
    return ComparedPlan.model_validate(
        {
            **common,
            "model": plan.model,
            "num_microbatches": plan.num_microbatches,
            "balance": plan.balance,
            "replicas": tuple(stage.replicas for stage in plan.stages),
            "step_time_s": plan.step_time_s,
            "times_slowest": times_slowest,
            "samples_per_s": plan.samples_per_s,
            "bubble_fraction": plan.bubble_fraction,
            "peak_memory_bytes": max(plan.memory_by_device().values()),
            "gap": plan.proof.gap,
            "estimated": plan.estimated,
        }
    )
