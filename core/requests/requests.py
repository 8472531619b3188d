"""Requests to measure or estimate a model, shared by the command line, the service and Python."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from ..cluster.cluster import Cluster
from ..document import Record
from ..graph.graph import Graph
from ..graph.tensors import Sample
from ..models.families import ModelSpec
from ..models.training_memory import RECIPES, Recipe
from ..profile.profile import Profile
from .precision import AskedPrecision


class ProfilingOptions(Record):
    """Settings of one measurement.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``; `None` measures where the model already is.
        num_threads: CPU threads used by the measured model; `None` leaves torch's default.
        busy_neighbours: Processes kept busy with the same work on other cores meanwhile, so that
            ranks sharing a machine are measured as they will run.
        budget_s: Seconds to spend on repeats, over all layers.
        autocast: Run under ``torch.autocast`` with this dtype.
        precision: Recipe of training that plans of this profile follow. Models of a family are
            converted to its weights' type; others have to be of it.
        compile: Compile every layer with ``torch.compile`` first.
        deduplicate: Measure layers that cost the same once.
    """

    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    num_threads: int | None = Field(None, ge=1, le=1024)
    busy_neighbours: int = Field(0, ge=0, le=64)
    budget_s: float = Field(20.0, gt=0, le=3600)
    autocast: Literal["bfloat16", "float16"] | None = None
    precision: Recipe | None = None
    compile: bool = False
    deduplicate: bool = True

    @model_validator(mode="before")
    @classmethod
    def _autocast_as_recipe(cls, data: Any) -> Any:
        """Take autocast from the recipe; refuse another one."""
        if not isinstance(data, dict) or data.get("precision") not in RECIPES:
            return data
        recipe = RECIPES[data["precision"]]
        if data.get("autocast") not in (None, recipe.autocast):
            raise ValueError(
                f"precision {data['precision']!r} means autocast={recipe.autocast!r}, not "
                f"{data['autocast']!r}; leave autocast out"
            )
        return {**data, "autocast": recipe.autocast}


class FactoryCall(Record):
    """A model factory that the service's administrator has registered.

    Attributes:
        name: The registered name, which determines the code that is imported.
        arguments: Keyword arguments, checked against the registered JSON Schema.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class MeasureRequest(Record):
    """Input of the measuring process: a model and its sample, or a graph.

    Attributes:
        model: Family and configuration of the model to build.
        sample: Its inputs.
        graph: A rebuildable graph, instead of a model and a sample; it has its own sample.
        factory: A registered model factory, instead of ``model``.
    """

    model: ModelSpec | None = None
    sample: Sample | None = None
    graph: Graph | None = None
    factory: FactoryCall | None = None
    profiling: ProfilingOptions = ProfilingOptions()

    @model_validator(mode="after")
    def _check(self) -> Self:
        models = [m for m in (self.model, self.factory) if m is not None]
        if self.graph is not None and (models or self.sample is not None):
            raise ValueError("give a graph alone, or a model and its sample")
        if self.graph is None and (len(models) != 1 or self.sample is None):
            raise ValueError("give a model and its sample, or a graph")
        return self


class EstimateOptions(Record):
    """Settings of an analytical estimate.

    Attributes:
        device: Accelerator of the catalogue to assume for every device; `None` infers it from
            each device's kind, or from its memory if the kind is unknown.
        precision: Precision of weights, activations and products, or a recipe of training that
            implies one; `None` for 16 bits on GPUs, float32 on CPUs, and the weights' type for a
            graph.
    """

    device: str | None = Field(None, max_length=80)
    precision: AskedPrecision | None = None


class EstimateRequest(Record):
    """Input of the estimating process: a model and its sample, or a graph.

    Attributes:
        model: Family and configuration.
        sample: Its inputs; by default those of `default_samples`.
        graph: A rebuildable graph, instead of a model and a sample.
        cluster: Devices to estimate for; kinds other than the first are given a speed.
    """

    model: ModelSpec | None = None
    sample: Sample | None = None
    graph: Graph | None = None
    cluster: Cluster
    estimate: EstimateOptions = EstimateOptions()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.graph is None) == (self.model is None):
            raise ValueError("give either a graph or a model")
        if self.graph is not None and self.sample is not None:
            raise ValueError("a graph carries its own sample")
        return self


class Estimated(Record):
    """Result of an `EstimateRequest`.

    Attributes:
        profile: Profile for the cluster's first kind of device.
        cluster: The requested cluster, with speeds for the other kinds.
        taken: Accelerator of the catalogue assumed for each kind.
    """

    profile: Profile
    cluster: Cluster
    taken: dict[str, str]
