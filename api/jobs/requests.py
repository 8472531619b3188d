"""Requests to measure a model."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.sample import Sample
from ...core.models.families import ModelSpec
from ...core.requests.requests import FactoryCall, ProfilingOptions
from ..model_sources.graph_limits import check_graph, check_rebuilt
from ..planning.requests import check_sample_size, inside

SOURCES = ("model", "graph", "graph_id", "factory")


class ProfileJobRequest(Record):
    """Request to measure a model on a worker.

    Attributes:
        model: A family and its configuration.
        sample: The inputs of one of its micro-batches.
        graph: Instead, a captured model, which carries its own sample.
        graph_id: A graph the service has stored.
        factory: A model that is registered on the server by name; takes a ``sample`` too.
        profiling: How to measure, and on which sort of device.
        device_kind: The kind of GPU it has to be, such as ``H200``; any if not given.
    """

    model: ModelSpec | None = None
    sample: Sample | None = None
    graph: Graph | None = None
    graph_id: str | None = Field(None, max_length=80)
    factory: FactoryCall | None = None
    profiling: ProfilingOptions | None = None
    device_kind: str | None = Field(None, pattern=r"^[\w.+-]{1,40}$")

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
        if self.sample is not None:
            check_sample_size(self.sample)
        if self.graph is not None:
            inside("/graph", check_graph, self.graph)
            inside("/graph", check_rebuilt, self.graph)
        return self
