"""What a job is to do, as its row keeps it."""

from __future__ import annotations

from ...core.cluster.accelerators import get_accelerator
from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.requests.requests import MeasureRequest
from ..planning.requests import PlanRequest
from .messages import CPU, CUDA


class JobSpec(Record):
    """What is measured, and what comes of it.

    Attributes:
        measure: The measurement; a job has one.
        measure_digest: Of everything its outcome depends on.
        fresh: Measure even what was measured before.
        plan: The request whose answer is wanted; `None` if the profile is.
        plan_digest: Of that request.
        plan_deadline_s: Longest its plan may be searched for.
    """

    measure: MeasureRequest
    measure_digest: str
    fresh: bool = False
    plan: PlanRequest | None = None
    plan_digest: str | None = None
    plan_deadline_s: float = 20.0


def read_job_spec(request_json: str) -> JobSpec:
    """What a job of ours is to do."""
    return JobSpec.model_validate_json(request_json)


def required_resource(request: MeasureRequest, kind: str | None, cluster: Cluster | None) -> str:
    """What a worker has to offer for a measurement.

    A GPU is looked for by its kind where the request names one, or plans for devices of one kind
    that the catalogue knows; any GPU will do otherwise.

    Args:
        request: What is measured, and on what sort of device.
        kind: The kind asked for.
        cluster: What is planned for.

    Raises:
        InvalidInput: A kind is named, and the processor is to be measured.
    """
    device = request.profiling.device or "cpu"
    if device == "cpu":
        if kind is not None and kind.lower() != CPU:
            raise InvalidInput(
                f"{kind} is a GPU, and 'profiling' measures on the CPU; give "
                '{"device": "cuda"} there',
                field="/profiling/device",
            )
        return CPU
    if kind is not None:
        return _catalogue_name(kind) or kind
    kinds = {entry.kind for entry in cluster.devices} if cluster is not None else set()
    return (_catalogue_name(kinds.pop()) if len(kinds) == 1 else None) or CUDA


def _catalogue_name(kind: str) -> str | None:
    try:
        known = get_accelerator(kind)
    except InvalidInput:
        return None
    return known.name if known.backend != "cpu" else None
