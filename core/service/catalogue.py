"""What can be asked of a service: devices, model families, and its limits."""

from __future__ import annotations

from typing import Any, Literal

from ..cluster.accelerators import Accelerator
from ..document import Record
from ..graph.sample import Sample
from ..models.families import ModelSpec

CodeOf = Literal["nobody", "this release's own families", "the administrator's", "the sender's"]
"""Whose code runs."""


class AcceleratorList(Record):
    """The catalogue that estimates go by."""

    accelerators: tuple[Accelerator, ...]


class Published(Record):
    """A published model of a family.

    Attributes:
        model: What to send as ``model``.
        sequence_length: Tokens of a sample in its publication, where it has any.
    """

    name: str
    model: ModelSpec
    num_parameters: int
    source: str
    sequence_length: int | None = None


class ModelFamily(Record):
    """Models that can be asked for by name.

    Attributes:
        config_schema: JSON Schema of the ``config``.
        default_sample: The sample an estimate takes where none is given, of the default config.
        published: Known models of the family.
        available: Whether this server can build one; workers of its own are not asked.
        reason: Why not.
    """

    family: str
    description: str
    config_schema: dict[str, Any]
    default_sample: Sample
    published: tuple[Published, ...] = ()
    available: bool = True
    reason: str = ""


class ModelFamilyList(Record):
    """Every family."""

    model_families: tuple[ModelFamily, ...]


class Tier(Record):
    """One way to say what the model is.

    Attributes:
        name: The field of ``POST /v1/plans``, or the route to send it to.
        runs_code: Whose code runs for it.
        available: Whether this server takes it now.
        reason: Why not.
    """

    name: str
    description: str
    runs_code: CodeOf
    available: bool
    reason: str = ""


class FactoryEntry(Record):
    """A model that is registered by name.

    Attributes:
        name: What to send as ``factory.name``.
        arguments_schema: JSON Schema of ``factory.arguments``.
    """

    name: str
    description: str
    arguments_schema: dict[str, Any]


class Limits(Record):
    """What a request may be at most."""

    body_bytes: int
    plan_deadline_s: float
    measure_deadline_s: float
    shorthand_devices: int
    sample_bytes: int
    graph_layers: int
    graph_operations: int


class Capabilities(Record):
    """What this server does.

    Attributes:
        models: Ways to say what the model is.
        factories: Models that are registered here.
        sandbox: What children that estimate and measure on this machine are put into.
    """

    version: str
    models: tuple[Tier, ...]
    factories: tuple[FactoryEntry, ...] = ()
    sandbox: Literal["bubblewrap", "none"] = "none"
    objectives: tuple[str, ...]
    schedules: tuple[str, ...]
    plan_formats: tuple[str, ...]
    profile_formats: tuple[str, ...]
    limits: Limits
