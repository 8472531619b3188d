"""Random clusters of unlike devices, and plans of a small model with stages anywhere on them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.forward_only import for_serving
from stagewright.core.profile.profile import Profile
from stagewright.formats.plan_for import apply_rules
from stagewright.formats.target import Target
from stagewright.planner.price_split import plan_from_balance
from tests.builders import chain_profile

BLOCKS = 6
NAMES = ("embed", *(f"layers.{block}" for block in range(BLOCKS)), "norm", "head")
LAYER_BYTES = 4 * 10**6
KINDS = (("80GB", 40, 1.0), ("24GB", 8, 0.6), ("12GB", 5, 1.7), ("8GB", 3, 0.3))
"""Kinds of devices: name, layers that fit about, speed."""


def build_profile() -> Profile:
    """Return a chain of an embedding, equal blocks, a norm and a head, all with weights."""
    costs = chain_profile(
        [1e-3] * len(NAMES), forward_bytes=10**5, parameter_bytes=LAYER_BYTES, saved_bytes=10**5
    )
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(costs.layers, NAMES, strict=True)
    )
    boundaries = tuple(
        gap.model_copy(
            update={
                "tensors": tuple(
                    each.model_copy(update={"name": f"{each.name}{gap.after}"})
                    for each in gap.tensors
                )
            }
        )
        for gap in costs.boundaries
    )
    return costs.model_copy(update={"layers": layers, "boundaries": boundaries})


def draw_cluster(draw: random.Random, *, inference: bool) -> Cluster:
    """Return one to three machines of one to four devices, of one kind or mixed."""
    state_bytes = LAYER_BYTES * (1 if inference else 4)  # weights, gradients and Adam's moments
    sizes = [draw.randint(1, 4) for _ in range(draw.choice([1, 1, 1, 2, 2, 3]))]
    sizes[0] = max(sizes[0], 3 - sum(sizes[1:]))
    several = len(sizes) > 1
    devices: list[Device] = []
    for node, size in enumerate(sizes):
        kinds = draw.sample(KINDS, draw.randint(1, 3))
        for _ in range(size):
            kind, memory, speed = draw.choice(kinds)
            devices.append(
                Device(
                    name=f"{kind}:{len(devices)}",
                    kind=kind,
                    memory_bytes=memory * state_bytes,
                    speed=speed,
                    place={"node": f"n{node}"} if several else {},
                )
            )
    if several and draw.random() < 0.3:  # listed across machines
        draw.shuffle(devices)
    network = LinkLevel(name="network", latency_s=2e-5, bandwidth_bytes_per_s=1e9)
    inside = LinkLevel(name="node", latency_s=5e-6, bandwidth_bytes_per_s=1e10)
    return Cluster(devices=tuple(devices), levels=(inside, network) if several else (inside,))


def without_memory_limits(cluster: Cluster) -> Cluster:
    devices = (device.model_copy(update={"memory_bytes": None}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})


def draw_placed_plan(
    draw: random.Random, target: Target, profile: Profile, cluster: Cluster
) -> Plan:
    """Return a plan with stages on any devices, cut within a target's rules."""
    rules = target.rules
    if rules.inference:
        profile = for_serving(profile, last_position=rules.last_position)
    schedule = draw.choice(rules.schedules or ("1f1b",))
    chunks = 1 if schedule in ("gpipe", "1f1b", "zero_bubble") else 2
    options = PlanOptions(schedule=schedule, num_microbatches=12)
    forbidden = apply_rules(target, profile, options).no_cut_after
    legal = [cut for cut in range(1, len(NAMES)) if NAMES[cut - 1] not in forbidden]
    while True:
        places = draw.randint(2, min(4, len(cluster.devices)))
        cuts = draw.choice([*combinations(legal, places * chunks - 1), ()])
        counts = [last - first for first, last in pairwise((0, *cuts, len(NAMES)))]
        inside = {
            sum(first <= at < last for at in range(1, 1 + BLOCKS))
            for first, last in pairwise((0, *cuts, len(NAMES)))
        }
        if cuts and (not rules.equal_blocks or len(inside) == 1):
            break
    held = draw.sample(range(len(cluster.devices)), places)
    if draw.random() < 0.5:
        held.sort(key=lambda index: cluster.devices[index].place.get("node", ""))
    devices = [(index,) for index in held] * chunks
    if schedule in ("zbv", "dualpipev"):
        devices[places:] = reversed(devices[places:])
    options = options.model_copy(update={"chunks": chunks if chunks > 1 else 2})
    return plan_from_balance(profile, cluster, options, counts, devices=devices)
