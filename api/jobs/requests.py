"""Requests to measure a model, and the specification of a job as its row stores it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from ...core.cluster.accelerators import get_accelerator
from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.tensors import Sample
from ...core.requests.model_input import ModelInput, expand_model
from ...core.requests.requests import FactoryCall, MeasureRequest, ProfilingOptions
from ..planning.requests import PlanRequest, check_model
from .messages import CPU, CUDA

SOURCES = ("model", "graph", "graph_id", "factory")


class ProfileJobRequest(Record):
    """Request to measure a model on a worker.

    Attributes:
        model: A family and its configuration, the name of a published model, or a Hugging Face
            ``config.json``.
        sample: The inputs of one of its micro-batches.
        graph: Instead, a captured model, which carries its own sample.
        graph_id: A graph the service has stored.
        factory: A model that is registered on the server by name; takes a ``sample`` too.
        profiling: How to measure, and on which sort of device.
        device_kind: The kind of GPU it has to be, such as ``H200``; any if not given.
    """

    model: ModelInput | None = None
    sample: Sample | None = None
    graph: Graph | None = None
    graph_id: str | None = Field(None, max_length=80)
    factory: FactoryCall | None = None
    profiling: ProfilingOptions | None = None
    device_kind: str | None = Field(None, pattern=r"^[\w.+-]{1,40}$")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expand_model(data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(map(repr, given)) or "none"
            raise InvalidInput(
                f"give exactly one of {', '.join(map(repr, SOURCES))}; found {found}",
                field=f"/{given[-1] if given else 'model'}",
            )
        is_graph = given[0].startswith("graph")
        if is_graph == (self.sample is not None):
            words = "a graph carries its own" if is_graph else "a model is measured with a sample"
            raise InvalidInput(f"{words}; 'sample' is for a 'model'", field="/sample")
        check_model(self.sample, self.graph)
        return self


class JobSpec(Record):
    """A measurement and the plan to make from it.

    Attributes:
        measure_digest: Digest of everything the measurement's result depends on.
        fresh: Whether to measure again what was measured before.
        plan: The request to answer; `None` if only the profile is wanted.
        plan_deadline_s: Time limit of the search for the plan.
    """

    measure: MeasureRequest
    measure_digest: str
    fresh: bool = False
    plan: PlanRequest | None = None
    plan_digest: str | None = None
    plan_deadline_s: float = 20.0


def required_resource(request: MeasureRequest, kind: str | None, cluster: Cluster | None) -> str:
    """Return the resource that a worker must offer for a measurement.

    A GPU must be of a certain kind if the request names one, or plans for devices of a single kind
    in the catalogue; otherwise any GPU will do.

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
