"""Plans with split layers, reduced to plans of groups of devices, by a second computation.

Each group of t devices that splits the layers of a replica becomes its first device, and every
layer costs what it costs one of them; what remains is checked like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, log2

from ...core.cluster.cluster import Cluster
from ...core.graph.graph import Parameter
from ...core.plan.plan import Baseline, Plan, Stage
from ...core.profile.profile import LayerProfile, Profile, SplitLayer
from .reference_placement import all_reduce_s

LOST_PER_HALVING = 0.025
"""Share of a product's time that is lost each time its part is halved."""


def group_faults(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Yield what is wrong with the groups of devices that split layers between them."""
    degree = plan.options.tensor
    if degree not in (1, "auto", *(split.degree for split in profile.splits)):
        yield f"the profile does not say how layers split over {degree} devices"
        return
    where = {device.name: index for index, device in enumerate(cluster.devices)}
    for number, stage in enumerate(plan.stages):
        if stage.tensor != degree:
            yield f"stage {number}: tensor is {stage.tensor}, expected {degree}"
            return
        for replica in range(stage.replicas):
            names = stage.devices[replica * stage.tensor : (replica + 1) * stage.tensor]
            members = [where[name] for name in names if name in where]
            devices = [cluster.devices[index] for index in members]
            if len({(one.kind, one.speed, one.memory_bytes) for one in devices}) > 1:
                yield f"stage {number}: {', '.join(names)} split layers but are not alike"
            elif stage.tensor > 1 and any(
                cluster.link(members[0], other) != cluster.levels[0] for other in members[1:]
            ):
                yield f"stage {number}: {', '.join(names)} are not all in one innermost group"


def reduce_to_groups(
    plan: Plan, profile: Profile, cluster: Cluster
) -> tuple[Plan, Profile, Cluster]:
    """Return the plan, the profile and the cluster with every group as one device."""
    degree = plan.options.tensor
    if degree == 1 or degree == "auto":
        return plan, profile, cluster
    return _reduce_plan(plan, degree), *reduce_problem(profile, cluster, degree)


def reduce_problem(profile: Profile, cluster: Cluster, degree: int) -> tuple[Profile, Cluster]:
    """Return the profile and the cluster with every group of so many devices as one."""
    split = next(one for one in profile.splits if one.degree == degree)
    layers = [
        _reduce_layer(entry, own, degree, cluster)
        for entry, own in zip(profile.layers, split.layers, strict=True)
    ]
    kept = [
        _share(own.saved_activation_bytes, entry.saved_activation_bytes)
        for entry, own in zip(profile.layers, split.layers, strict=True)
    ]
    held = [
        _share(own.parameter_bytes, entry.layer.parameter_bytes)
        for entry, own in zip(profile.layers, split.layers, strict=True)
    ]
    parameters = [_reduce_parameter(entry, held) for entry in profile.parameters]
    storages = [
        entry.model_copy(
            update={"size_bytes": ceil(entry.size_bytes * max(kept[i] for i in entry.layers))}
        )
        for entry in profile.storages
    ]
    known = set(split.divided)
    boundaries = [
        gap.model_copy(
            update={
                "tensors": tuple(
                    one.model_copy(update={"parts": degree if one.name in known else 1})
                    for one in gap.tensors
                )
            }
        )
        for gap in profile.boundaries
    ]
    edges = [
        edge.model_copy(
            update={
                "tensor": edge.tensor.model_copy(
                    update={"parts": degree if edge.tensor.name in known else 1}
                )
            }
        )
        for edge in profile.edges
    ]
    reduced = profile.model_copy(
        update={
            "layers": tuple(layers),
            "boundaries": tuple(boundaries),
            "edges": tuple(edges),
            "parameters": tuple(parameters),
            "storages": tuple(storages),
            "splits": (),
        }
    )
    return reduced, _reduce_cluster(cluster, degree)


def _share(part: int, whole: int) -> float:
    return float(Fraction(part, whole)) if whole else 1.0


def _reduce_parameter(entry: Parameter, held: list[float]) -> Parameter:
    part = max([held[layer] for layer in entry.layers] or [1.0])
    if entry.numel == 0:
        return entry.model_copy(update={"size_bytes": ceil(entry.size_bytes * part)})
    elements = ceil(entry.numel * part)
    size = ceil(Fraction(entry.size_bytes, entry.numel) * elements)
    return entry.model_copy(update={"size_bytes": size, "numel": elements})


def _reduce_layer(
    entry: LayerProfile, own: SplitLayer, degree: int, cluster: Cluster
) -> LayerProfile:
    link = cluster.levels[0]
    share = own.compute_share
    if share < 1:
        share = min(1.0, share + share * LOST_PER_HALVING * log2(degree))
    passes = max(1, (own.forward_gathered_bytes > 0) + (own.backward_gathered_bytes > 0))
    times = []
    for timing, reduced, count, gathered in (
        (entry.forward, own.forward_reduced_bytes, own.forward_reductions,
         own.forward_gathered_bytes),
        (entry.backward, own.backward_reduced_bytes, own.backward_reductions,
         own.backward_gathered_bytes),
    ):  # fmt: skip
        # All calls of one kind are of one size; gathering is one of the two halves of a sum.
        time_s = 0.0
        for calls, size, halves in ((count, reduced, 2), (own.gathers / passes, gathered, 1)):
            number = calls or 1  # no number is given of what one call sends
            time_s += number * all_reduce_s(link, size / number, degree) * halves / 2
        times.append(
            timing.model_copy(
                update={
                    "median_s": timing.median_s * share + time_s * cluster.devices[0].speed,
                }
            )
        )
    return entry.model_copy(
        update={
            "layer": entry.layer.model_copy(update={"parameter_bytes": own.parameter_bytes}),
            "forward": times[0],
            "backward": times[1],
            "saved_activation_bytes": own.saved_activation_bytes,
            "workspace_bytes": own.workspace_bytes,
        }
    )


def _reduce_plan(plan: Plan, degree: int) -> Plan:
    def first(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(names) if index % degree == 0)

    def stage(one: Stage) -> Stage:
        return one.model_copy(update={"devices": first(one.devices), "tensor": 1})

    def baseline(one: Baseline) -> Baseline:
        return one.model_copy(update={"devices": tuple(map(first, one.devices))})

    proof = plan.proof
    if plan.options.objective == "devices":
        proof = proof.model_copy(
            update={"value": proof.value / degree, "lower_bound": proof.lower_bound / degree}
        )
    return plan.model_copy(
        update={
            "stages": tuple(map(stage, plan.stages)),
            "baselines": tuple(map(baseline, plan.baselines)),
            "proof": proof,
        }
    )


def _reduce_cluster(cluster: Cluster, degree: int) -> Cluster:
    """Return the first device of every full group, in the places they have now."""
    heads: list[int] = []
    run: list[int] = []
    for index, device in enumerate(cluster.devices):
        last = cluster.devices[run[0]] if run else None
        if last is not None and (
            (last.kind, last.memory_bytes) != (device.kind, device.memory_bytes)
            or cluster.link(run[0], index) != cluster.levels[0]
        ):
            run = []
        run.append(index)
        if len(run) == degree:
            heads.append(run[0])
            run = []
    inner = range(len(cluster.levels) - 1)
    devices = []
    for index in heads:
        place = {f"level {level}": str(_group(cluster, level, index)) for level in inner}
        devices.append(cluster.devices[index].model_copy(update={"place": place}))
    levels = []
    for level, link in enumerate(cluster.levels):
        update: dict[str, object] = {"name": f"level {level}", "group_size": None}
        if link.shared and level:
            update["bandwidth_bytes_per_s"] = link.bandwidth_bytes_per_s / degree
            if link.all_reduce_bandwidth_bytes_per_s:
                rate = link.all_reduce_bandwidth_bytes_per_s / degree
                update["all_reduce_bandwidth_bytes_per_s"] = rate
            if link.all_reduce:
                knots = [(count, rate / degree) for count, rate in link.all_reduce.bandwidth]
                figures = link.all_reduce.model_copy(update={"bandwidth": tuple(knots)})
                update["all_reduce"] = figures
        levels.append(link.model_copy(update=update))
    # Levels that join nothing but the devices of one group.
    while len(levels) > 1 and len({one.place[levels[0].name] for one in devices}) == len(devices):
        name = levels.pop(0).name
        devices = [
            one.model_copy(update={"place": {k: v for k, v in one.place.items() if k != name}})
            for one in devices
        ]
    return Cluster(devices=tuple(devices), levels=tuple(levels))


def _group(cluster: Cluster, level: int, index: int) -> str:
    link = cluster.levels[level]
    if link.group_size is not None:
        return str(index // link.group_size)
    return cluster.devices[index].place[link.name]
