"""What there is: devices, clusters, model families, and what the service takes."""

from __future__ import annotations

from ...core.cluster.cluster import Cluster
from ...core.service.catalogue import AcceleratorList, Capabilities, ModelFamily, ModelFamilyList
from ..request_builders import get
from ..retry import exchange
from ..sans_io import Steps


def capabilities() -> Steps[Capabilities]:
    """What the service takes, does and allows."""
    return (yield from exchange(get("capabilities"))).read(Capabilities)


def accelerators() -> Steps[AcceleratorList]:
    """Devices that estimates can be made for."""
    return (yield from exchange(get("accelerators"))).read(AcceleratorList)


def model_families() -> Steps[ModelFamilyList]:
    """Models that can be asked for by name."""
    return (yield from exchange(get("model-families"))).read(ModelFamilyList)


def model_family(family: str) -> Steps[ModelFamily]:
    """One family, with the schema of its configuration.

    Raises:
        NotFound: There is none.
    """
    call = get("model-families", family)
    return (yield from exchange(call)).read(ModelFamily)


def cluster(devices: str) -> Steps[Cluster]:
    """The cluster that shorthand such as ``4x24GB`` stands for."""
    return (yield from exchange(get("clusters", devices=devices))).read(Cluster)
