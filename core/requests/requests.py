"""How a profile is to be measured, as data that every caller shares."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from ..cluster.accelerators import Precision
from ..cluster.cluster import Cluster
from ..document import Record
from ..graph.graph import Graph
from ..graph.sample import Sample
from ..models.families import ModelSpec
from ..profile.profile import Profile


class ProfilingOptions(Record):
    """Settings of one measurement.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``; `None` measures where the model already is.
        num_threads: CPU threads used by the measured model; `None` leaves torch's default.
        busy_neighbours: Processes kept busy with the same work on other cores meanwhile, so that
            ranks sharing a machine are measured as they will run.
        budget_s: Seconds to spend on repeats, over all layers.
        autocast: Run under ``torch.autocast`` with this dtype.
        compile: Compile every layer with ``torch.compile`` first.
        deduplicate: Measure layers that cost the same once.
    """

    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    num_threads: int | None = Field(None, ge=1, le=1024)
    busy_neighbours: int = Field(0, ge=0, le=64)
    budget_s: float = Field(20.0, gt=0, le=3600)
    autocast: Literal["bfloat16", "float16"] | None = None
    compile: bool = False
    deduplicate: bool = True


class FactoryCall(Record):
    """A model that whoever runs the service registered by name.

    Attributes:
        name: As registered; what is imported for it is the registration's to say.
        arguments: Keyword arguments, checked against the registration's JSON Schema.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class ModelCode(Record):
    """A model as Python, for a service that allows it.

    Attributes:
        source: Text of a module.
        entry: Name of the function in it that returns the model, an ``nn.Module``.
    """

    source: str = Field(min_length=1, max_length=2**18)
    entry: str = Field("build", pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")


class MeasureRequest(Record):
    """What to measure, in a process of its own: a model and a sample as data, or a graph.

    Attributes:
        model: Family and configuration of a model to be built.
        sample: Its inputs.
        graph: Instead of both, a captured model that can be rebuilt; it carries its own sample.
        factory: Instead of a model, one that is registered where it is measured.
        code: Instead of a model, its code.
    """

    model: ModelSpec | None = None
    sample: Sample | None = None
    graph: Graph | None = None
    factory: FactoryCall | None = None
    code: ModelCode | None = None
    profiling: ProfilingOptions = ProfilingOptions()

    @model_validator(mode="after")
    def _check(self) -> Self:
        models = [m for m in (self.model, self.factory, self.code) if m is not None]
        if self.graph is not None and (models or self.sample is not None):
            raise ValueError("give a graph alone, or a model and its sample")
        if self.graph is None and (len(models) != 1 or self.sample is None):
            raise ValueError("give a model and its sample, or a graph")
        return self


class EstimateOptions(Record):
    """How costs are told without the device.

    Attributes:
        device: What to take every device of the cluster for, by its name in the catalogue; `None`
            goes by each device's kind, or by its memory where the kind says nothing.
        precision: Of weights, activations and products; `None` takes 16 bits on GPUs and float32
            on CPUs, and for a graph the type of its weights.
    """

    device: str | None = Field(None, max_length=80)
    precision: Precision | None = None


class EstimateRequest(Record):
    """What to estimate, in a process of its own: a model and a sample as data, or a graph.

    Attributes:
        model: Family and configuration.
        sample: Its inputs; `core.default_samples` if not given.
        graph: Instead of both, a captured model that can be rebuilt.
        cluster: The devices to estimate for; other kinds than the first get a speed.
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
    """The answer to an `EstimateRequest`.

    Attributes:
        profile: For the cluster's first kind of device.
        cluster: As asked, other kinds of devices with their speed.
        taken: For each kind, what the catalogue calls it.
    """

    profile: Profile
    cluster: Cluster
    taken: dict[str, str]
