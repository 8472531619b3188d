"""The service's catalogue: accelerators, model families, capabilities and limits."""

from __future__ import annotations

from typing import Any, Literal

from ..cluster.accelerators import Accelerator
from ..document import Record
from ..graph.tensors import Sample
from ..models.families import ModelSpec

CodeOf = Literal["nobody", "this release's own families", "the administrator's"]
"""The party whose code runs on the service."""


class Published(Record):
    """A published model of a family.

    Attributes:
        model: Value for the request field ``model``.
        sequence_length: Tokens per sample in its publication, if it says.
    """

    name: str
    model: ModelSpec
    num_parameters: int
    source: str
    sequence_length: int | None = None


class ModelFamily(Record):
    """A family of models that can be named instead of sent.

    Attributes:
        config_schema: JSON Schema of the ``config``.
        default_sample: Sample used for estimates of the default config if none is given.
        published: Published models of the family.
        available: Whether this server itself, not counting its workers, can build the models.
        reason: Reason if it cannot.
    """

    family: str
    description: str
    config_schema: dict[str, Any]
    default_sample: Sample
    published: tuple[Published, ...] = ()
    available: bool = True
    reason: str = ""


class Tier(Record):
    """One form in which a model can be given.

    Attributes:
        name: Field of ``POST /v1/plans``, or the route that accepts it.
        runs_code: The party whose code runs for it.
        available: Whether this server accepts it at present.
        reason: Reason if it does not.
    """

    name: str
    description: str
    runs_code: CodeOf
    available: bool
    reason: str = ""


class FactoryEntry(Record):
    """A registered model factory.

    Attributes:
        name: Value for ``factory.name``.
        arguments_schema: JSON Schema of ``factory.arguments``.
    """

    name: str
    description: str
    arguments_schema: dict[str, Any]


class Limits(Record):
    """Limits of a request."""

    body_bytes: int
    plan_deadline_s: float
    measure_deadline_s: float
    shorthand_devices: int
    sample_bytes: int
    graph_layers: int
    graph_operations: int


class Capabilities(Record):
    """Capabilities of this server.

    Attributes:
        models: Forms in which a model can be given.
        factories: Registered model factories.
        model_families: Families of models that can be named instead of sent.
        accelerators: Devices for which costs can be estimated, with their data sheets.
        sandbox: Sandbox of the child processes that estimate and measure on this machine.
    """

    version: str
    models: tuple[Tier, ...]
    factories: tuple[FactoryEntry, ...] = ()
    model_families: tuple[ModelFamily, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    sandbox: Literal["bubblewrap", "none"] = "none"
    objectives: tuple[str, ...]
    schedules: tuple[str, ...]
    plan_formats: tuple[str, ...]
    profile_formats: tuple[str, ...]
    limits: Limits
