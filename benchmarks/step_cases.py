"""Random planning problems of the families on which the simulated step is judged.

They are drawn from a seed: few layers and devices for `step_brute_force.py`, medium ones for
`annealing.py`. Slow links, uneven layers, memory that binds, levels and kinds are all among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.graph.graph import Boundary, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, SavedStorage, Timing


@dataclass(frozen=True)
class Case:
    """Arguments of a call of `plan`, and a name to find them again."""

    name: str
    profile: Profile
    cluster: Cluster
    options: PlanOptions


@dataclass(frozen=True)
class LayerShape:
    """One layer: seconds, bytes kept and owned, and bytes sent behind it."""

    forward_s: float
    backward_s: float
    saved_bytes: int
    weight_bytes: int
    sent_bytes: int


def build_profile(name: str, shapes: list[LayerShape]) -> Profile:
    """Return a chain profile of these layers."""
    layers, boundaries, parameters, storages = [], [], [], []
    for index, shape in enumerate(shapes):
        layers.append(
            LayerProfile(
                layer=Layer(name=f"layer.{index}"),
                forward=Timing(median_s=shape.forward_s),
                backward=Timing(median_s=shape.backward_s),
            )
        )
        parameters.append(
            Parameter(
                names=(f"layer.{index}.weight",),
                size_bytes=4 * (shape.weight_bytes // 4),
                numel=shape.weight_bytes // 4,
                layers=(index,),
            )
        )
        storages.append(SavedStorage(size_bytes=shape.saved_bytes, layers=(index,)))
        if index + 1 < len(shapes):
            hidden = TensorSpec(
                name="hidden", shape=(shape.sent_bytes,), dtype="uint8", requires_grad=True
            )
            boundaries.append(Boundary(after=index, tensors=(hidden,)))
    return Profile(
        model=name,
        layers=tuple(layers),
        boundaries=tuple(boundaries),
        parameters=tuple(parameters),
        storages=tuple(storages),
    )


def draw_shapes(draw: random.Random, count: int) -> list[LayerShape]:
    """Draw equal, uneven or VGG-like layers; backwards take one to three times a forward."""
    how = draw.choice(["even", "uneven", "uneven", "falling"])
    ratio = draw.uniform(1.5, 2.5)
    shapes = []
    for index in range(count):
        part = index / max(1, count - 1)
        spread = {"even": 0.1, "uneven": 0.8, "falling": 0.3}[how]
        work_s = 1e-3 * draw.uniform(1 - spread, 1 + spread)
        own = ratio if how == "even" else ratio * draw.uniform(0.7, 1.4)
        sent = 1e6 * draw.uniform(1 - spread, 1 + spread)
        weight = 4e6 * draw.uniform(1 - spread, 1 + spread)
        if how == "falling":  # few bytes late, most weights at the end
            work_s, sent = work_s * (1.5 - part), sent * 0.05**part * 4
            weight *= 10**part / 2
        shapes.append(
            LayerShape(work_s, work_s * own, int(sent * draw.uniform(1, 4)), int(weight), int(sent))
        )
    return shapes


def draw_level(draw: random.Random, group_size: int) -> LinkLevel:
    """Draw a link from so fast that it does not matter to slower than the layers."""
    return LinkLevel(
        name=f"level {group_size}",
        group_size=group_size,
        latency_s=draw.choice([0.0, 1e-5, 1e-4]),
        bandwidth_bytes_per_s=10 ** draw.uniform(8.3, 11),
    )


def draw_cluster(draw: random.Random, num_devices: int, *, flat: bool = False) -> Cluster:
    """Draw devices of one or two kinds on one level of links, or in pairs on two."""
    kinds = ["a"] * num_devices
    if not flat and draw.random() < 0.25:
        first = draw.randrange(1, num_devices)
        kinds[first:] = ["b"] * (num_devices - first)
    speed = {"a": 1.0, "b": draw.choice([0.5, 1.5, 2.0])}
    outer = draw_level(draw, num_devices + num_devices % 2)
    levels = [outer]
    if num_devices > 2 and draw.random() < 0.3:
        fast = {
            "name": "node",
            "group_size": 2,
            "bandwidth_bytes_per_s": outer.bandwidth_bytes_per_s * draw.uniform(2, 20),
        }
        levels = [outer.model_copy(update=fast), outer]
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, speed=speed[kind])
        for index, kind in enumerate(kinds)
    )
    return Cluster(devices=devices, levels=tuple(levels))


def limit_memory(case: Case, memory_bytes: int) -> Case:
    """Return the case with every device limited to these bytes."""
    devices = tuple(
        device.model_copy(update={"memory_bytes": memory_bytes}) for device in case.cluster.devices
    )
    cluster = case.cluster.model_copy(update={"devices": devices})
    return Case(case.name, case.profile, cluster, case.options)


FAMILIES = ("closed", "zero_bubble", "interleaved")
"""1F1B and GPipe, the zero-bubble schedule, and interleaved 1F1B."""


def draw_small(family: str, seed: int) -> Case:
    """Draw a problem with few enough plans to try them all; memory is not limited yet."""
    draw = random.Random(f"{family} {seed}")
    num_layers, num_devices = draw.randrange(3, 9), draw.randrange(2, 7)
    schedule = {"zero_bubble": "zero_bubble", "interleaved": "interleaved_1f1b"}.get(
        family, draw.choice(["1f1b", "1f1b", "gpipe"])
    )
    asked = {
        "schedule": schedule,
        "num_microbatches": draw.choice([2, 3, 4, 6, 8, 8, 12, 16]),
        "max_replicas": draw.choice([1, 1, 2, None]),
        "recompute": draw.choice(["never", "never", "never", "auto"]),
        "optimizer": draw.choice(["none", "adam"]),
    }
    profile = build_profile(f"{family} {seed}", draw_shapes(draw, num_layers))
    return Case(f"{family} {seed}", profile, draw_cluster(draw, num_devices), PlanOptions(**asked))


def draw_medium(seed: int) -> Case:
    """Draw a problem far too large to try all plans: 16 to 48 layers, 4 to 16 devices.

    Every other one is VGG-like: many bytes early, most weights late. Links carry 0.3 to 12 GB/s.
    """
    draw = random.Random(f"medium {seed}")
    num_layers, num_devices = draw.randrange(16, 49), draw.choice([4, 6, 8, 8, 12, 16])
    shapes = draw_vgg(draw, num_layers) if seed % 2 else draw_shapes(draw, num_layers)
    level = LinkLevel(
        name="link",
        group_size=num_devices,
        latency_s=draw.choice([1e-5, 5e-5]),
        bandwidth_bytes_per_s=10 ** draw.uniform(8.48, 10.08),
    )
    levels = [level]
    if num_devices % 4 == 0 and num_devices > 4 and draw.random() < 0.3:
        inside = {"name": "node", "group_size": 4, "bandwidth_bytes_per_s": 5e10}
        levels = [level.model_copy(update=inside), level]
    kinds = ["a"] * num_devices
    if draw.random() < 0.2 and len(levels) == 1:
        kinds[num_devices // 2 :] = ["b"] * (num_devices - num_devices // 2)
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, speed={"a": 1.0, "b": 1.6}[kind])
        for index, kind in enumerate(kinds)
    )
    options = PlanOptions(
        schedule=draw.choice(["1f1b", "1f1b", "gpipe", "zero_bubble"]),
        num_microbatches=draw.choice([8, 16, 32, 48]),
        max_replicas=draw.choice([1, None, None]),
        recompute=draw.choice(["never", "auto"]),
        optimizer="adam",
    )
    name = f"medium {seed}"
    profile = build_profile(name, shapes)
    return Case(name, profile, Cluster(devices=devices, levels=tuple(levels)), options)


def draw_vgg(draw: random.Random, count: int) -> list[LayerShape]:
    """Draw convolutions with ever fewer bytes, and a few layers at the end that own the weights."""
    dense, shapes = max(2, count // 10), []
    for index in range(count):
        part = index / count
        if index >= count - dense:
            work_s, sent, weight = 1e-3 * draw.uniform(0.3, 1), 1.6e4, 4e8 / dense
        else:
            light = draw.random() < 0.4  # activations and pooling between convolutions
            work_s = 1e-3 * draw.uniform(0.1, 0.4) if light else 1e-3 * draw.uniform(2, 8)
            sent, weight = 5e7 * 0.03**part * draw.uniform(0.7, 1.4), 0 if light else 1e7 * part
        shapes.append(
            LayerShape(work_s, 2 * work_s, int(sent * draw.uniform(1, 2)), int(weight), int(sent))
        )
    return shapes
