"""Which plans are run over RPC, and on how many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.plan import Plan
from ..supported_plans import check_runnable


def with_split(plan: Plan, num_split: int) -> Plan:
    """The plan for the same batch in another number of micro-batches.

    Raises:
        InvalidInput: The batch does not divide so.
    """
    if not plan.inputs:
        raise InvalidInput("this plan records no inputs; plan with num_microbatches instead")
    batch = plan.inputs[0].shape[0] * plan.num_microbatches
    if num_split < 1 or batch % num_split:
        raise InvalidInput(f"num_split is {num_split}; it has to divide the batch of {batch}")
    size = batch // num_split
    inputs = tuple(
        spec.model_copy(update={"shape": (size, *spec.shape[1:])}) for spec in plan.inputs
    )
    changed = {"num_microbatches": num_split, "inputs": inputs}
    if size != plan.inputs[0].shape[0]:
        changed["boundaries"] = ()  # their shapes are those of the planned size
    return plan.model_copy(update=changed)


def check_places(plan: Plan, workers: Sequence[str], devices: Sequence[object] | None) -> None:
    """Refuse what would run otherwise than planned, and too few places.

    Raises:
        PlanMismatch: The plan uses what is not run here.
        InvalidInput: There is not one worker, and one device, for each stage.
    """
    check_runnable(plan, "one device")
    if any(stage.replicas > 1 for stage in plan.stages):
        raise PlanMismatch("a plan with replicas is not run over RPC; plan with --max-replicas 1")
    if any(stage.recompute != "never" for stage in plan.stages):
        raise PlanMismatch("recomputation is not done over RPC; plan with --recompute never")
    if len(workers) != plan.num_stages:
        raise InvalidInput(
            f"the plan has {plan.num_stages} stages, but {len(workers)} workers are named; name "
            "one for each stage, the same one several times if it serves several"
        )
    if devices is not None and len(devices) != plan.num_stages:
        raise InvalidInput(
            f"{len(devices)} devices for {plan.num_stages} stages; give one for each stage"
        )
