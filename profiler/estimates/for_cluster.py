"""Estimates for the devices of a cluster: which catalogue entries they are, and how fast each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...core.cluster.accelerators import (
    CATALOGUE,
    Accelerator,
    Precision,
    default_precision,
    explain_precision,
    find_by_driver_name,
    find_by_memory,
    get_accelerator,
)
from ...core.cluster.cluster import Cluster, Device
from ...core.errors import InvalidInput, MeasurementError, first_line
from ...core.graph.graph import Graph
from ...core.graph.tensors import Sample
from ...core.models.families import ModelSpec
from ...core.models.training_memory import Recipe
from ...core.profile.profile import Profile
from ...core.requests.precision import AskedPrecision, split_precision
from ..graphs.rebuilt_capture import rebuild_captured
from .calibration import FLOATING, TENSORS
from .cluster_estimate import ClusterEstimate
from .estimate import document, rates_for, spec_work, target
from .layer_costs import EstimateTarget, ModelWork, captured_work
from .meta_device import META, empty_meta


def graph_precision(graph: Graph, asked: Precision | None = None) -> Precision | None:
    """Return the precision asked for if the graph's floating state is of it, else that state's."""
    types = Counter(tensor.dtype for tensor in graph.state if tensor.dtype in FLOATING)
    if not types:
        return asked
    found = types.most_common(1)[0][0]
    fitting = [name for name, dtype in TENSORS.items() if dtype == found]
    if not fitting or (asked is not None and asked not in fitting):
        wanted = f", not of {asked}" if asked is not None else ""
        raise InvalidInput(
            f"the graph's weights are of {found}{wanted}; capture the model converted to the type "
            "it is to be estimated in",
            field="/precision",
        )
    return asked or fitting[0]


def graph_work(graph: Graph, wanted: EstimateTarget) -> ModelWork:
    """Count the work of a graph's layers for one micro-batch, without the unknown loss."""
    captured = rebuild_captured(graph, META).captured
    shapes = {tensor.name: tensor for tensor in graph.inputs}
    flat = [empty_meta(shapes[name]) for name in captured.program.structure.names]
    try:
        return captured_work(captured, flat, wanted, graph=graph)
    except MeasurementError as error:
        raise InvalidInput(
            f"the graph cannot be estimated: {first_line(error)}", field="/operations"
        ) from error


def estimate_for_cluster(
    spec: ModelSpec,
    sample: Sample,
    cluster: Cluster,
    *,
    kind: str | None = None,
    precision: AskedPrecision | None = None,
    calibrate_by: Sequence[Profile] = (),
) -> ClusterEstimate:
    """Estimate a model of a family for a cluster, capturing it once.

    A device's kind is a name of the catalogue or one that a driver reports; if it is neither, a
    catalogue device with that memory is taken, and with ``kind`` all are taken for that one. The
    precision is one that all of them have. Calibration is by profiles on the first kind of device.
    """
    computed, recipe = split_precision(precision)
    return _estimate(
        lambda wanted: spec_work(spec, sample, wanted),
        cluster,
        kind=kind,
        precision=computed,
        recipe=recipe,
        spec=spec,
        calibrate_by=calibrate_by,
    )


def estimate_graph_for_cluster(
    graph: Graph,
    cluster: Cluster,
    *,
    kind: str | None = None,
    precision: AskedPrecision | None = None,
) -> ClusterEstimate:
    """Estimate a rebuildable graph for a cluster's devices, run on meta tensors alone.

    Its tensors' types decide the precision; ``tf32`` is for the products of a float32 graph.
    """
    computed, recipe = split_precision(precision)
    return _estimate(
        lambda wanted: graph_work(graph, wanted),
        cluster,
        kind=kind,
        precision=graph_precision(graph, computed),
        recipe=recipe,
    )


def _estimate(
    work_on: Callable[[EstimateTarget], ModelWork],
    cluster: Cluster,
    *,
    kind: str | None,
    precision: Precision | None,
    recipe: Recipe | None = None,
    spec: ModelSpec | None = None,
    calibrate_by: Sequence[Profile] = (),
) -> ClusterEstimate:
    taken: dict[str, Accelerator] = {}
    guessed: dict[str, tuple[Accelerator, ...]] = {}
    for device in cluster.devices:
        if device.kind in taken:
            continue
        if kind is not None:
            taken[device.kind] = get_accelerator(kind)
        else:
            found = _by_name(device.kind)
            if found is None:
                guessed[device.kind] = _by_memory(device)
                found = guessed[device.kind][0]
            taken[device.kind] = found
    first = taken[cluster.devices[0].kind]
    decided = precision or default_precision(list(taken.values()))
    targets = {name: target(found, decided, 1) for name, found in taken.items()}
    wanted = targets[cluster.devices[0].kind]
    work = work_on(wanted)
    rates = rates_for(wanted, calibrate_by)
    profile = document(work, wanted, rates, spec, calibrate_by, recipe=recipe)
    if precision is None and (note := explain_precision(list(taken.values()))):
        profile = profile.model_copy(update={"notes": (*profile.notes, note)})
    speeds = {
        # Exactly 1 for the kind the profile is of; for others the ratio of two uncalibrated times,
        # since calibration by profiles of one kind says nothing about another.
        name: 1.0 if other.device is first else _usual_s(work, wanted) / _usual_s(work, other)
        for name, other in targets.items()
    }
    devices = tuple(
        device.model_copy(update={"speed": device.speed * speeds[device.kind]})
        for device in cluster.devices
    )
    return ClusterEstimate(profile, cluster.model_copy(update={"devices": devices}), taken, guessed)


def _by_name(kind: str) -> Accelerator | None:
    for entry in CATALOGUE:
        if kind.lower() in (entry.name.lower(), *entry.aliases):
            return entry
    return find_by_driver_name(kind)


def _by_memory(device: Device) -> tuple[Accelerator, ...]:
    near = find_by_memory(device.memory_bytes) if device.memory_bytes else ()
    if not near:
        names = ", ".join(entry.name for entry in CATALOGUE)
        raise InvalidInput(
            f"what {device.kind!r} devices can do is not in the catalogue, which has {names}; say "
            "which one to take (--estimate-for, or estimate.device over HTTP), or profile the "
            "model on such a device",
            field="/devices",
        )
    return near


def _usual_s(work: ModelWork, wanted: EstimateTarget) -> float:
    """Time of a step of all layers, uncalibrated: there are profiles of one kind at most."""
    profile = document(work, wanted, rates_for(wanted, ()))
    return sum(entry.forward.median_s + entry.backward.median_s for entry in profile.layers)
