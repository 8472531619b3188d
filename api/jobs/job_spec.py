"""Specification of a job, as its row stores it."""

from __future__ import annotations

from ...core.cluster.accelerators import get_accelerator
from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.requests.requests import MeasureRequest
from ..planning.requests import PlanRequest
from .messages import CPU, CUDA


class JobSpec(Record):
    """A measurement and the plan to make from it.

    Attributes:
        measure: The measurement.
        measure_digest: Digest of everything its result depends on.
        fresh: Whether to measure again what was measured before.
        plan: The request to answer; `None` if only the profile is wanted.
        plan_digest: Digest of that request.
        plan_deadline_s: Time limit of the search for the plan.
    """

    measure: MeasureRequest
    measure_digest: str
    fresh: bool = False
    plan: PlanRequest | None = None
    plan_digest: str | None = None
    plan_deadline_s: float = 20.0


def read_job_spec(request_json: str) -> JobSpec:
    """Parse the request that a job's row holds."""
    return JobSpec.model_validate_json(request_json)


def required_resource(request: MeasureRequest, kind: str | None, cluster: Cluster | None) -> str:
    """Return the resource that a worker must offer for a measurement.

    A GPU must be of a certain kind if the request names one, or plans for devices of a single kind
    in the catalogue; otherwise any GPU will do.

    Args:
        request: The measurement.
        kind: The kind of GPU requested.
        cluster: The cluster planned for.

    Raises:
        InvalidInput: A GPU is named, but the CPU is to be measured.
    """
    device = request.profiling.device or "cpu"
    if device == "cpu":
        if kind is not None and kind.lower() != CPU:
            raise InvalidInput(
                f"{kind} is a GPU, but 'profiling' measures on the CPU; set it to "
                '{"device": "cuda"}',
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
