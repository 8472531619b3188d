"""What makes two requests the same: everything their answer depends on, versions included."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ... import __version__
from ...core.document import json_digest
from ...core.requests.requests import EstimateRequest, MeasureRequest
from ...core.service.plans import PlanRecord
from ...planner.plan import was_cut_short
from ...schedules.numba_jit import is_available
from .requests import PlanRequest

PACKAGES = ("torch", "transformers", "numpy")
"""What profiles and plans are computed with."""


def plan_digest(request: PlanRequest, deadline_s: float) -> str:
    """Of a planning request that is given so much time to search."""
    asked = request.model_dump(mode="json", exclude={"deadline_s", "profile", "graph"})
    for name in ("profile", "graph"):
        asked[name] = None
        document = getattr(request, name)
        if document is not None:  # as if it had been stored first
            asked[f"{name}_id"] = document.content_id()
    return _digest({"plan": asked, "deadline_s": deadline_s, "compiled": is_available()})


def is_final(record: PlanRecord) -> bool:
    """Whether it answers the same request for good: more time would find nothing better."""
    return record.plan is None or not was_cut_short(record.plan)


def estimate_digest(request: EstimateRequest) -> str:
    """Of an estimate for one kind of device, however many there are."""
    first = request.cluster.devices[0]
    asked: dict[str, Any] = {
        **request.model_dump(mode="json", exclude={"cluster", "graph"}),
        "graph": None if request.graph is None else request.graph.content_id(),
        "kind": first.kind,
        "memory_bytes": first.memory_bytes,
    }
    return _digest({"estimate": asked})


def measure_digest(request: MeasureRequest, needs: str, place: str) -> str:
    """Of a measurement on one kind of device, at one place (see `jobs.place`)."""
    asked = request.model_dump(mode="json", exclude={"graph"})
    if request.graph is not None:
        asked["graph"] = request.graph.content_id()
    return _digest({"measure": asked, "needs": needs, "place": place})


def _digest(asked: dict[str, Any]) -> str:
    versions = {"stagewright": __version__, **{name: _version(name) for name in PACKAGES}}
    return json_digest({**asked, "versions": versions})


@cache
def _version(package: str) -> str:
    """Looked up once: it takes longer than the rest of a digest."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
