"""The service's catalogue: capabilities, accelerators, model families and cluster shorthand."""

from __future__ import annotations

from ...core.cluster.cluster import Cluster
from ...core.service.catalogue import AcceleratorList, Capabilities, ModelFamily, ModelFamilyList
from ..request_builders import build_get
from ..retry import send_with_retries
from ..sans_io import Steps


def capabilities() -> Steps[Capabilities]:
    """Return the service's features and limits."""
    return (yield from send_with_retries(build_get("capabilities"))).read(Capabilities)


def accelerators() -> Steps[AcceleratorList]:
    """Return the accelerators for which costs can be estimated."""
    return (yield from send_with_retries(build_get("accelerators"))).read(AcceleratorList)


def model_families() -> Steps[ModelFamilyList]:
    """Return the model families that can be named instead of sent."""
    return (yield from send_with_retries(build_get("model-families"))).read(ModelFamilyList)


def model_family(family: str) -> Steps[ModelFamily]:
    """Return one model family, with the schema of its configuration."""
    call = build_get("model-families", family)
    return (yield from send_with_retries(call)).read(ModelFamily)


def cluster(devices: str) -> Steps[Cluster]:
    """Return the cluster that shorthand such as ``4x24GB`` stands for."""
    return (yield from send_with_retries(build_get("clusters", devices=devices))).read(Cluster)
