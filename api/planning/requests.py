"""What may be asked of the service."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.sample import MAX_SAMPLE_BYTES, Sample
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from ...core.models.families import ModelSpec
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...core.requests.requests import (
    EstimateOptions,
    FactoryCall,
    MeasureRequest,
    ModelCode,
    ProfilingOptions,
)
from ...core.units import format_bytes
from ..model_sources.graph_limits import check_graph, check_rebuilt

MAX_SHORTHAND_DEVICES = 65_536
"""A few bytes of request must not become much work; a body of 16 MiB holds about as many devices
as a document. 200 layers over so many devices were planned in 3 s of processor time."""


def _parse_shorthand(value: object) -> object:
    if not isinstance(value, str):
        return value
    return Cluster.parse(value, max_devices=MAX_SHORTHAND_DEVICES)


ClusterInput = Annotated[
    Cluster, BeforeValidator(_parse_shorthand, json_schema_input_type=Cluster | str)
]
"""A cluster document, or its shorthand such as ``4x24GB``, ``8xH200`` or ``2x80GB,4x24GB``."""


SOURCES = ("profile", "profiles", "profile_id", "model", "graph", "graph_id", "factory", "code")
DATA = ", ".join(map(repr, SOURCES[:-2]))
CHOICES = f"exactly one of {DATA}, or where the server takes them 'factory' or 'code'"


class PlanRequest(Record):
    """Plan a model from its profile, or estimate or measure the model first.

    Attributes:
        profile: Costs of the model's layers; nothing is run.
        profiles: Several of one model, measured at several sizes of micro-batches, where the
            options name a ``batch_size``: the size is chosen too.
        profile_id: A profile the service has stored.
        model: A family and its configuration, to be estimated or measured by the service.
        graph: A captured model, as ``stagewright capture`` writes it: operations and shapes, no
            weights and no code. It is estimated; with ``profiling`` it is measured, with made-up
            weights.
        graph_id: A graph the service has stored.
        factory: A model that is registered on the server by name; it is measured.
        code: A model's code, where the server allows it; it is measured.
        sample: The inputs of one micro-batch; an estimate of a ``model`` has a usual one.
        estimate: Tell costs by the catalogue of devices; of a graph that is the usual way.
        profiling: How to measure, which is what happens to a ``model`` without ``estimate``.
        cluster: The devices: a document, or shorthand such as ``4x24GB``, ``2xcpu``, ``8xH200``,
            ``4x8x80GB`` (4 nodes of 8) or ``2x80GB,4x24GB`` (two kinds).
        options: What to plan for.
        deadline_s: Longest to search: then the best plan so far is the answer, or a problem with
            status 422 if there is none. The server's own limit if not given.
    """

    profile: Profile | None = None
    profiles: tuple[Profile, ...] | None = Field(None, min_length=1, max_length=12)
    profile_id: str | None = Field(None, max_length=80)
    model: ModelSpec | None = None
    graph: Graph | None = None
    graph_id: str | None = Field(None, max_length=80)
    factory: FactoryCall | None = None
    code: ModelCode | None = None
    sample: Sample | None = None
    estimate: EstimateOptions | None = None
    profiling: ProfilingOptions | None = None
    cluster: ClusterInput
    options: PlanOptions = PlanOptions()
    deadline_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if not given:
            raise InvalidInput(f"say what to plan by {CHOICES}; found none")
        if len(given) > 1:
            raise InvalidInput(
                f"say what to plan by {CHOICES}; found {' and '.join(map(repr, given))}",
                field=f"/{given[-1]}",
            )
        self._check_source(given[0])
        if self.sample is not None:
            check_sample_size(self.sample)
        if self.graph is not None:
            inside("/graph", check_graph, self.graph)
            inside("/graph", check_rebuilt, self.graph)
        return self

    def _check_source(self, source: str) -> None:
        """Refuse what says how to learn the costs of something else than is given."""
        taken = {
            "model": {"sample", "estimate", "profiling"},
            "graph": {"estimate", "profiling"},
            "factory": {"sample", "profiling"},
            "code": {"sample", "profiling"},
        }
        allowed = taken.get(source.removesuffix("_id"), set())
        for name in ("sample", "profiling", "estimate"):
            if getattr(self, name) is None or name in allowed:
                continue
            if source.startswith("graph"):
                raise InvalidInput(
                    f"{name!r} is for a 'model': a graph carries its own sample", field=f"/{name}"
                )
            if source in ("factory", "code"):
                raise InvalidInput(
                    f"what a {source!r} makes is measured, not estimated; leave {name!r} out",
                    field=f"/{name}",
                )
            raise InvalidInput(
                f"{name!r} says how to learn the costs of a 'model', and none is given",
                field=f"/{name}",
            )
        if self.estimate is not None and self.profiling is not None:
            raise InvalidInput("a model is estimated or measured, not both", field="/profiling")
        is_measured = source in ("model", "factory", "code") and self.estimate is None
        if is_measured and self.sample is None:
            way_out = ", or 'estimate' it" if source == "model" else ""
            raise InvalidInput(
                f"a model is measured with a sample; give one{way_out}", field="/sample"
            )

    @property
    def is_measured(self) -> bool:
        """Whether something has to be measured before planning."""
        if self.graph is not None or self.graph_id is not None:
            return self.profiling is not None
        models = (self.model, self.factory, self.code)
        return self.estimate is None and any(model is not None for model in models)

    def measure_request(self, graph: Graph | None = None) -> MeasureRequest | None:
        """What has to be measured before planning, if anything.

        Args:
            graph: What ``graph_id`` names.
        """
        if not self.is_measured:
            return None
        return MeasureRequest(
            model=self.model,
            sample=self.sample,
            graph=self.graph or graph,
            factory=self.factory,
            code=self.code,
            profiling=self.profiling or ProfilingOptions(),
        )


def inside(field: str, check: Callable[[Graph], None], graph: Graph) -> None:
    """Check a graph that is part of a body, and point at it there."""
    try:
        check(graph)
    except InvalidInput as error:
        raise InvalidInput(str(error), field=f"{field}{error.field or ''}") from None


def check_sample_size(sample: Sample) -> None:
    """Refuse a sample whose tensors together are larger than the service makes up.

    Raises:
        InvalidInput: It has more than `MAX_SAMPLE_BYTES`.
    """
    tensors = [*sample.inputs.values(), *([sample.target] if sample.target else [])]
    size_bytes = sum(prod(tensor.shape) * ELEMENT_SIZE_BYTES[tensor.dtype] for tensor in tensors)
    if size_bytes > MAX_SAMPLE_BYTES:
        raise InvalidInput(
            f"the sample has {format_bytes(size_bytes)}, at most {format_bytes(MAX_SAMPLE_BYTES)} "
            "are accepted; make the micro-batch smaller",
            field="/sample",
        )
