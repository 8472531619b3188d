"""Seeded small planning problems with every feature in them, for brute force to solve as well."""

from __future__ import annotations

import random
from dataclasses import dataclass

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.cluster.collectives import AllReduceFigures
from stagewright.core.plan.plan import Pin, Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.assemble import build_plan
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve
from tests.builders import chain_profile, random_profile
from tests.planner.oracle import least

SPEEDS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Instance:
    """What `plan` is called with."""

    profile: Profile
    cluster: Cluster
    options: PlanOptions

    def asked(self, **changes):
        """The same with other options."""
        fields = {**dict(self.options), **changes}
        return Instance(self.profile, self.cluster, PlanOptions.model_validate(fields))

    def limited(self, memory_bytes):
        """The same with another limit on every device, by kind or one for all."""
        devices = tuple(
            device.model_copy(
                update={
                    "memory_bytes": memory_bytes[device.kind]
                    if isinstance(memory_bytes, dict)
                    else memory_bytes
                }
            )
            for device in self.cluster.devices
        )
        cluster = self.cluster.model_copy(update={"devices": devices})
        return Instance(self.profile, cluster, self.options)


def plan_alone(given):
    """`plan`, but for the ways out that an `Infeasible` names: they take longer than the plan."""
    return search_alone(given).plan


@dataclass(frozen=True)
class Searched:
    """A plan, and the least value that the exact search found for its own objective, bounded.

    That objective is a closed form of the step where the plan's is the simulated step.
    """

    plan: Plan
    best_value: float
    lower_bound: float


def search_alone(given):
    """`plan_alone`, with what the exact search found and proved."""
    request = PlanningRequest(given.profile, given.cluster, given.options)
    decision = solve(request)
    made = build_plan(request, decision)
    if not decision.closed_value:
        return Searched(made, made.proof.value, made.proof.lower_bound)
    return Searched(made, decision.closed_value, decision.closed_bound)


def instance(seed, **asked):
    """A profile of 1 to 6 layers, a cluster of 1 to 5 devices, and options.

    Clusters are flat or pairs of devices, of one kind or of two with their own speed and, where
    memory is limited, their own limit. Limits are set about the least that any plan needs, so
    that they bind, and sometimes nothing fits.

    Args:
        seed: Of everything.
        asked: Options to use instead of drawn ones.
    """
    draw = random.Random(seed)
    num_layers = draw.choice([1, 2, 3, 4, 5, 5, 6, 6])
    profile = random_profile(
        seed,
        num_layers,
        ties=draw.choice([0, 0, 1, 2]),
        illegal=draw.choice([0.0, 0.0, 0.2]),
        storages=draw.random() < 0.8,
    )
    cluster = draw_cluster(draw, draw.choice([1, 2, 3, 3, 4, 4, 5, 5]))
    drawn = draw_options(draw, profile, cluster)
    found = Instance(profile, cluster, drawn).asked(**asked)
    return bound_memory(draw, found) if draw.random() < 0.5 else found


def with_figures(seed, given):
    """The same, with all-reduces of most levels by size and number: more may sum much faster."""
    draw = random.Random(f"figures {seed}")
    levels = []
    for level in given.cluster.levels:
        if draw.random() < 0.8:
            counts = sorted(draw.sample(range(2, 9), draw.randint(1, 4)))
            slow = level.bandwidth_bytes_per_s
            figures = AllReduceFigures(
                start_s=level.latency_s * draw.uniform(0, 2),
                step_s=level.latency_s * draw.uniform(0, 2),
                small_share=draw.uniform(0.05, 1),
                large_start_s=level.latency_s * draw.uniform(0, 10),
                large_step_s=level.latency_s * draw.uniform(0, 10),
                bandwidth=tuple((count, slow * 10 ** draw.uniform(-1, 1.5)) for count in counts),
            )
            update = {"all_reduce": figures, "all_reduce_bandwidth_bytes_per_s": None}
            level = level.model_copy(update=update)
        levels.append(level)
    cluster = given.cluster.model_copy(update={"levels": tuple(levels)})
    return Instance(given.profile, cluster, given.options)


def summed_instance(seed, **asked):
    """2 or 3 layers with many parameters on 4 to 9 equal devices, of which more may sum faster.

    The sums take as long as the work or longer, and memory may force several replicas or stages.
    """
    draw = random.Random(seed)
    work_s = [draw.uniform(0.2e-3, 2e-3) for _ in range(draw.choice([2, 2, 3]))]
    profile = chain_profile(work_s, parameter_bytes=10**6, saved_bytes=draw.choice([10**3, 10**6]))
    num_devices = draw.randint(4, 9)
    levels = draw_levels(draw, draw.choice([(9,), (9,), (2, 10), (4, 12)]))
    levels = tuple(
        level.scale(bandwidth_factor=10 ** draw.uniform(8, 10) / level.bandwidth_bytes_per_s)
        for level in levels
    )
    options = {
        "num_microbatches": draw.choice([4, 6, 8, 9, 12, 31]),
        "schedule": draw.choice(["1f1b", "gpipe"]),
        "max_replicas": None,
        **asked,
    }
    cluster = _cluster("a" * num_devices, {"a": 1.0}, levels)
    found = with_figures(seed, Instance(profile, cluster, PlanOptions(**options)))
    return bound_memory(draw, found) if draw.random() < 0.6 else found


KINDS = "abc"

PATTERNS = ("aabbbbaaaabb", "aabbbbaaaaaa", "aaaabbaaaaaa", "bbaabbaaaabb", "aaaabbaaaaab")
"""Two kinds over pairs, sixes and twelves of devices: a level holds unequal numbers of one."""

SHAPES = ((12,), (2, 12), (4, 12), (2, 4, 12), (3, 6, 12), (2, 6, 12), (4, 8, 16), (2, 4, 8, 16))
"""Group sizes, innermost first."""


def wide_instance(seed, **asked):
    """1 to 5 layers on 2 to 12 devices; the fewer layers, the more devices.

    Up to four link levels whose last groups are partial, outer links faster than inner ones now
    and then, some links shared; up to three kinds, each with its speed and its limit, in blocks
    or interleaved, so that groups hold unequal numbers of one.
    """
    draw = random.Random(seed)
    num_layers = draw.choice([1, 2, 2, 2, 3, 3, 4, 5])
    most = {1: 12, 2: 12, 3: 9, 4: 7, 5: 6}[num_layers]
    profile = random_profile(
        seed,
        num_layers,
        ties=draw.choice([0, 0, 0, 1]),
        illegal=draw.choice([0.0, 0.0, 0.0, 0.2]),
        storages=draw.random() < 0.8,
    )
    cluster = draw_wide_cluster(draw, draw.randint(min(4, most), most))
    drawn = draw_options(draw, profile, cluster, rarely=0.5)
    found = Instance(profile, cluster, drawn).asked(
        **{
            "num_microbatches": draw.choice([2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 64]),
            "max_replicas": draw.choice([None, None, None, 2, 3, 4]),
            **asked,
        }
    )
    return bound_memory(draw, found) if draw.random() < 0.5 else found


def patterned_instance(seed, **asked):
    """3 to 5 layers on the twelve devices of a pattern, where only one kind has memory."""
    draw = random.Random(seed)
    num_layers = draw.choice([3, 3, 4, 4, 5])
    profile = random_profile(seed, num_layers, ties=0, illegal=0)
    levels = draw_levels(draw, (2, 6, 12))
    kinds = draw.choice(PATTERNS)
    options = {
        "num_microbatches": draw.choice([4, 5, 8, 16]),
        "max_replicas": draw.choice([1, 2]) if num_layers < 5 else 1,
        "schedule": draw.choice(["1f1b", "gpipe"]),
        **asked,
    }
    alike = _cluster(kinds, dict.fromkeys(KINDS, 1.0), levels)
    found = Instance(profile, alike, PlanOptions(**options)).limited({"a": 10**9, "b": 1})
    needed = least(found, "memory")
    factor = draw.choice([1.0, 1.1, 1.2, 1.5, 2.0, 4.0])
    return found.limited({"a": int(needed.rank[0] * factor) + 1, "b": 1})


def replicated_instance(seed, **asked):
    """2 or 3 light layers on up to 15 devices of one kind: replicas take the partial groups too."""
    draw = random.Random(seed)
    num_layers = draw.choice([2, 2, 3])
    num_devices = draw.randint(5, 15 if num_layers == 2 else 9)
    profile = random_profile(seed, num_layers, ties=0, illegal=0)
    shape = draw.choice([shape for shape in SHAPES[3:] if shape[-1] >= num_devices])
    levels = tuple(
        LinkLevel(
            name=f"level {size}",
            group_size=size,
            latency_s=0.0,
            bandwidth_bytes_per_s=10 ** draw.uniform(8, 10),
        )
        for size in shape
    )
    options = {
        "num_microbatches": draw.choice([12, 31, 60, 64, 120]),
        "max_replicas": None,
        "num_stages": draw.choice([None, 2, 2]),
        "schedule": draw.choice(["1f1b", "gpipe"]),
        **asked,
    }
    cluster = _cluster("a" * num_devices, {"a": 1.0}, levels)
    return Instance(profile, cluster, PlanOptions(**options))


def draw_wide_cluster(draw, num_devices):
    kinds = [draw.choice(KINDS[: draw.choice([1, 1, 2, 3])]) for _ in range(num_devices)]
    if draw.random() < 0.4:
        kinds.sort()
    speed = {kind: draw.choice((*SPEEDS, 1.7)) for kind in KINDS}
    shape = draw.choice([shape for shape in SHAPES if shape[-1] >= num_devices])
    return _cluster(kinds, speed, draw_levels(draw, shape))


def draw_levels(draw, shape):
    """Links from the outermost in: each faster than the one around it, nearly always."""
    latency_s, bandwidth = draw.choice([0.0, 1e-5, 1e-4]), 10 ** draw.uniform(5, 8)
    levels = []
    for group_size in reversed(shape):
        levels.append(
            LinkLevel(
                name=f"level {group_size}",
                group_size=group_size,
                latency_s=latency_s,
                bandwidth_bytes_per_s=bandwidth,
                all_reduce_bandwidth_bytes_per_s=draw.choice(
                    [None, None, bandwidth * draw.uniform(0.2, 5)]
                ),
                shared=draw.random() < 0.25,
            )
        )
        latency_s /= draw.choice([1, 10])
        bandwidth *= draw.choice([0.01, 1, 1, 2, 2, 10, 10, 30, 30])
    return tuple(reversed(levels))


def _cluster(kinds, speed, levels):
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, speed=speed[kind])
        for index, kind in enumerate(kinds)
    )
    return Cluster(devices=devices, levels=levels)


def draw_cluster(draw, num_devices):
    kinds = _kinds(draw, num_devices)
    speed = {"fast": draw.choice(SPEEDS), "slow": draw.choice(SPEEDS)}
    between = LinkLevel(
        name="network",
        group_size=num_devices + num_devices % 2,
        latency_s=draw.choice([0.0, 10 ** draw.uniform(-5, -3.5)]),
        bandwidth_bytes_per_s=10 ** draw.uniform(6, 8),
        all_reduce_bandwidth_bytes_per_s=draw.choice([None, 10 ** draw.uniform(6, 8)]),
    )
    levels = [between]
    if num_devices > 2 and draw.random() < 0.5:
        inside = between.model_copy(
            update={
                "name": "node",
                "group_size": 2,
                "latency_s": between.latency_s / 10,
                "bandwidth_bytes_per_s": between.bandwidth_bytes_per_s * draw.uniform(2, 20),
            }
        )
        levels = [inside, between]
    return _cluster(kinds, speed, tuple(levels))


def _kinds(draw, num_devices):
    """All of one kind, one kind behind the other, or mixed (uneven numbers in each node)."""
    how = draw.choice(["one", "one", "blocks", "mixed"])
    if how == "one":
        return ["fast"] * num_devices
    if how == "blocks":
        fast = draw.randrange(num_devices + 1)
        return ["fast"] * fast + ["slow"] * (num_devices - fast)
    return [draw.choice(["fast", "slow"]) for _ in range(num_devices)]


def draw_options(draw, profile, cluster, rarely=1.0):
    """Options of every kind; ``rarely`` scales how often layers are pinned or kept together."""
    num_layers, num_devices = len(profile.layers), len(cluster.devices)
    names = [entry.layer.name for entry in profile.layers]
    most = min(num_layers, num_devices)
    together = []
    if draw.random() < 0.15 * rarely and num_layers > 1:
        together.append(tuple(draw.sample(names, 2)))
    pins = []
    if draw.random() < 0.2 * rarely:
        kind = draw.choice(cluster.devices).kind
        pin = draw.choice([{"stage": draw.randrange(most)}, {"kind": kind}])
        pins.append(Pin(layer=draw.choice(names), **pin))
    return PlanOptions(
        num_microbatches=draw.choice([1, 2, 3, 4, 5, 6, 6, 8, 12]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        num_stages=draw.choice([None] * 5 + [draw.randint((most + 1) // 2, most)]),
        max_stages=draw.choice([None] * 5 + [draw.randint((most + 1) // 2, most)]),
        max_replicas=draw.choice([None, None, 1, 2]),
        recompute=draw.choice(["never", "auto", "auto", "always"]),
        optimizer=draw.choice(["none", "sgd", "momentum", "adam"]),
        memory_fraction=draw.choice([1.0, 1.0, 0.9]),
        together=tuple(together),
        no_cut_after=tuple(draw.sample(names, 1)) if draw.random() < 0.15 * rarely else (),
        pins=tuple(pins),
        tied=draw.choice(["priced", "priced", "priced", "together"]),
    )


def bound_memory(draw, found):
    """With limits about the least any plan needs: near it, each kind its own."""
    needed = least(found, "memory")
    if needed is None:
        return found
    needed_bytes = needed.rank[0] / found.options.memory_fraction
    limits = {
        kind: int(needed_bytes * draw.choice([0.9, 1.0, 1.05, 1.2, 1.5, 2.0])) + 1
        for kind in dict.fromkeys(device.kind for device in found.cluster.devices)
    }
    return found.limited(limits)
