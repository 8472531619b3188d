"""This server's capabilities, with its catalogue of models and devices, and cluster shorthand."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Annotated, get_args

from fastapi import Query

from ... import __version__
from ...core.cluster.accelerators import CATALOGUE
from ...core.cluster.cluster import Cluster
from ...core.errors import Refused
from ...core.graph.tensors import MAX_SAMPLE_BYTES
from ...core.models.families import ModelSpec
from ...core.plan.plan import Objective
from ...core.plan.schedule import TrainingSchedule
from ...core.requests.default_samples import default_sample
from ...core.requests.presets import PRESETS
from ...core.service.catalogue import (
    Capabilities,
    CodeOf,
    FactoryEntry,
    Limits,
    ModelFamily,
    Published,
    Tier,
)
from ..http.pagination import blame_parameter
from ..jobs.workers import is_local
from ..model_sources.factories import Factories
from ..model_sources.families import why_not_buildable
from ..model_sources.graph_limits import MAX_LAYERS, MAX_OPERATIONS
from ..model_sources.measure import choose_sandbox
from ..planning.exports import PlanFormat, ProfileFormat
from ..planning.requests import MAX_SHORTHAND, MAX_SHORTHAND_DEVICES
from .dependencies import TheSettings, from_state, strict_router

router = strict_router("/v1", "catalogue")


@router.get("/clusters")
def read_cluster(
    devices: Annotated[
        str,
        Query(
            max_length=MAX_SHORTHAND,
            description="Shorthand: 4x24GB, 8xH200, 4x8x80GB (4 nodes of 8), 2x80GB,4x24GB.",
            examples=["4x24GB"],
        ),
    ],
) -> Cluster:
    """Return the cluster document for a shorthand, to edit its links or speeds."""
    with blame_parameter("devices"):
        return Cluster.parse(devices, max_devices=MAX_SHORTHAND_DEVICES)


@router.get("/capabilities")
def get_capabilities(
    settings: TheSettings, registered: Annotated[Factories, from_state("factories")]
) -> Capabilities:
    """Return what this server accepts: models, devices, formats and limits."""
    try:
        sandbox = choose_sandbox(settings.sandbox)
    except Refused:  # required, and not available: measuring is refused, the rest works
        sandbox = None
    return Capabilities(
        version=__version__,
        models=_tiers(registered, settings.scheduler),
        factories=tuple(
            FactoryEntry(
                name=name,
                description=factory.description,
                arguments_schema=factory.schema_of_arguments(),
            )
            for name, factory in sorted(registered.items())
        ),
        model_families=tuple(_families(is_local(settings.scheduler)).values()),
        accelerators=CATALOGUE,
        sandbox="none" if sandbox is None else "bubblewrap",
        objectives=get_args(Objective),
        schedules=get_args(TrainingSchedule),
        plan_formats=get_args(PlanFormat),
        profile_formats=get_args(ProfileFormat),
        limits=Limits(
            body_bytes=settings.max_body_bytes,
            plan_deadline_s=settings.plan_deadline_s,
            measure_deadline_s=settings.measure_deadline_s,
            shorthand_devices=MAX_SHORTHAND_DEVICES,
            sample_bytes=MAX_SAMPLE_BYTES,
            graph_layers=MAX_LAYERS,
            graph_operations=MAX_OPERATIONS,
        ),
    )


@cache
def _families(builds_here: bool) -> dict[str, ModelFamily]:
    """Return all model families by name, with the reason if one cannot be built here."""
    found: dict[str, ModelFamily] = {}
    for kind in get_args(get_args(ModelSpec)[0]):
        (name,) = get_args(kind.model_fields["family"].annotation)
        spec = kind(family=name)
        config = type(spec.config)
        reason = why_not_buildable(name) if builds_here else ""
        found[name] = ModelFamily(
            family=name,
            description=" ".join((config.__doc__ or "").split()),
            config_schema=config.model_json_schema(),
            default_sample=default_sample(spec),
            published=tuple(
                Published(
                    name=preset_name,
                    model=preset.spec,
                    num_parameters=preset.num_parameters,
                    source=preset.source,
                    sequence_length=preset.sequence_length,
                )
                for preset_name, preset in PRESETS.items()
                if preset.spec.family == name
            ),
            available=not reason,
            reason=reason,
        )
    return found


def _tiers(registered: Factories, scheduler: str) -> tuple[Tier, ...]:
    """Return the ways to name a model, in order of the trust they need."""
    has_torch = importlib.util.find_spec("torch") or not is_local(scheduler)  # or workers have it
    torch = "" if has_torch else "torch is not installed on this server"
    factories = "" if registered else "none is registered (factories_file)"
    model = "a family and its configuration, a published model's name, or a config.json"
    tiers: tuple[tuple[str, str, CodeOf, str], ...] = (
        ("profile", "numbers, inline or by profile_id", "nobody", ""),
        ("model", model, "this release's own families", torch),
        ("graph", "operations and shapes, inline or by graph_id", "nobody", torch),
        ("factory", "a registered name and its arguments", "the administrator's", factories),
    )
    return tuple(
        Tier(name=name, description=what, runs_code=whose, available=not reason, reason=reason)
        for name, what, whose, reason in tiers
    )
