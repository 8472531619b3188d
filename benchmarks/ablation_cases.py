"""Planning problems on which the planner's pieces are judged (`ablation.py`).

Measured models, uneven layers, slow links, short memory, several kinds of devices, schedules
without a closed form, irregular clusters and graphs with branches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from branches import bert, inception, profile_of, series_parallel, towers, unet
from gains import LINKS, MICROBATCHES, read_or_measure, tight_memory
from step_cases import Case, draw_medium, limit_memory

from planner import BETWEEN, INSIDE, uneven_profile
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve

FREE = {"max_replicas": None, "recompute": "auto"}
"""Options that leave most to the planner."""

MEDIUM = (0, 2, 3, 4, 5, 8, 9, 11, 12, 16, 17, 19, 21, 24, 30)
"""Seeds of `draw_medium`: even and falling layers, 0.3 to 12 GB/s."""

OTHER_SCHEDULES = (
    ("gpt2", "zero_bubble"), ("resnet50", "zero_bubble"), ("vgg", "zero_bubble"),
    ("gpt2", "interleaved_1f1b"), ("moe", "interleaved_1f1b"), ("unet", "zbv"),
    ("two_tower", "interleaved_1f1b"), ("resnet50", "dualpipev"), ("gpt2", "looped_bfs"),
)  # fmt: skip


@cache
def list_cases() -> list[tuple[str, Case]]:
    """Return every case with the name of its family.

    Some have as much memory as a share of what the plan without limits needs, so the list is made
    once, by the whole planner.
    """
    found = (
        ("realistic", _realistic()), ("uneven", _uneven()), ("slow links", _slow_links()),
        ("short memory", _short_memory()), ("schedules", _schedules()),
        ("medium schedules", _medium_schedules()), ("kinds", _kinds()), ("irregular", _irregular()),
        ("branches", _branches()), ("large", _large()),
    )  # fmt: skip
    return [(family, case) for family, members in found for case in members]


def _realistic() -> Iterator[Case]:
    for name, profile in read_or_measure(Path(__file__).parent / "profiles").items():
        options = PlanOptions(num_microbatches=MICROBATCHES, **FREE)
        yield Case(f"{name}, 8 devices, {LINKS[1].name}", profile, LINKS[1].cluster(8), options)
        for count in (4, 8):
            alone = PlanOptions(num_microbatches=MICROBATCHES, schedule="gpipe")
            yield Case(
                f"{name}, {count} devices, {LINKS[0].name}", profile, LINKS[0].cluster(count), alone
            )


def _nodes(count: int, memory_gb: float) -> Cluster:
    return Cluster.of_nodes(
        count, 8, inside=INSIDE, between=BETWEEN, memory_bytes=round(memory_gb * 1e9)
    )


def _uneven() -> Iterator[Case]:
    for layers, nodes, memory_gb in (
        (24, 1, 32), (48, 1, 20), (48, 2, 24), (48, 4, 32), (48, 8, 24), (100, 2, 40), (100, 8, 32),
        (100, 8, 80),
    ):  # fmt: skip
        options = PlanOptions(num_microbatches=2 * 8 * nodes, **FREE)
        name = f"{layers} layers, {8 * nodes} devices of {memory_gb} GB"
        yield Case(name, uneven_profile(layers, nodes), _nodes(nodes, memory_gb), options)


def _slow_links() -> Iterator[Case]:
    for seed in MEDIUM:
        yield draw_medium(seed)
    for seed in (1, 7):
        case = draw_medium(seed)
        options = PlanOptions(num_microbatches=16, max_extra_in_flight=4)
        yield Case(f"{case.name}, deeper warm-up", case.profile, case.cluster, options)


def _short_memory() -> Iterator[Case]:
    profiles = read_or_measure(Path(__file__).parent / "profiles")
    for name in ("gpt2", "resnet50", "unet", "moe", "vgg"):
        memory_bytes = tight_memory(profiles[name], 8, LINKS[1])
        for asked in (FREE, {"schedule": "zero_bubble", "recompute": "auto"}):
            options = PlanOptions(num_microbatches=MICROBATCHES, **asked)
            cluster = LINKS[1].cluster(8, memory_bytes)
            yield Case(f"{name}, {options.schedule}, short", profiles[name], cluster, options)
    for seed in (6, 13, 25, 32):
        case = draw_medium(seed)
        roomy = solve(PlanningRequest(case.profile, case.cluster, case.options)).costed
        needs = max(stage.memory.total_bytes for stage in roomy.stages)
        limited = limit_memory(case, int(random.Random(seed).choice([0.7, 0.85]) * needs))
        yield Case(f"{case.name}, short", limited.profile, limited.cluster, limited.options)


def _schedules() -> Iterator[Case]:
    profiles = read_or_measure(Path(__file__).parent / "profiles")
    for name, schedule in OTHER_SCHEDULES:
        options = PlanOptions(num_microbatches=MICROBATCHES, schedule=schedule)
        cluster = LINKS[2].cluster(8)
        yield Case(f"{name}, {schedule}, 8 devices", profiles[name], cluster, options)


def _medium_schedules() -> Iterator[Case]:
    """Medium problems for schedules without a closed form, half of them with short memory."""
    for seed in range(40, 64):
        draw, case = random.Random(seed), draw_medium(seed)
        schedule = ("zero_bubble", "interleaved_1f1b", "zbv", "zero_bubble")[seed % 4]
        changed = {"schedule": schedule, "recompute": draw.choice(["never", "auto"])}
        options = PlanOptions(
            num_microbatches=case.options.num_microbatches,
            max_replicas=case.options.max_replicas,
            **changed,
        )
        own = Case(f"{case.name}, {schedule}", case.profile, case.cluster, options)
        if seed % 2:
            try:
                roomy = solve(PlanningRequest(own.profile, own.cluster, options)).costed
            except Infeasible:
                continue
            needs = max(stage.held_bytes for stage in roomy.stages)
            share = draw.choice([0.6, 0.75, 0.9])
            limited = limit_memory(own, int(share * needs))
            own = Case(f"{own.name}, short", own.profile, limited.cluster, options)
        yield own


def _of_kinds(kinds: int, each: int, memory_gb: float) -> Cluster:
    """Equally many devices of each kind, in nodes of their own."""
    alike = _nodes(1, memory_gb) if kinds * each <= 8 else _nodes(kinds * each // 8, memory_gb)
    shapes = (("large", 1.0, 1.0), ("middle", 0.55, 5 / 6), ("small", 0.35, 0.5))
    devices = []
    for index, device in enumerate(alike.devices[: kinds * each]):
        kind, speed, share = shapes[index // each]
        changed = {"kind": kind, "speed": speed, "memory_bytes": round(share * memory_gb * 1e9)}
        devices.append(device.model_copy(update=changed))
    return alike.model_copy(update={"devices": tuple(devices)})


def _kinds() -> Iterator[Case]:
    for layers, kinds, each, memory_gb, asked in (
        (24, 2, 4, 24, FREE), (24, 2, 4, 24, {}), (48, 2, 8, 24, FREE), (48, 3, 8, 32, FREE),
        (100, 2, 32, 24, FREE), (24, 2, 4, 24, {"schedule": "zero_bubble"}),
        (24, 2, 4, 24, {"schedule": "zbv"}),
    ):  # fmt: skip
        options = PlanOptions(num_microbatches=16, gap=1e-3, **asked)
        free = ", free" * (asked == FREE)
        name = f"{layers} layers, {kinds} kinds of {each}, {options.schedule}{free}"
        yield Case(name, uneven_profile(layers, kinds), _of_kinds(kinds, each, memory_gb), options)
    pins = (Pin(layer="layer.0", kind="middle"), Pin(layer="layer.20", kind="large"))
    for schedule in ("1f1b", "zero_bubble"):
        options = PlanOptions(num_microbatches=16, gap=1e-3, pins=pins, schedule=schedule)
        name = f"24 layers, 2 kinds of 4, {schedule}, pinned"
        yield Case(name, uneven_profile(24, 9), _of_kinds(2, 4, 24), options)


def _irregular() -> Iterator[Case]:
    for layers, nodes, lost in ((24, 2, (3,)), (48, 4, (20,)), (48, 4, (3, 4, 20)), (48, 8, (20,))):
        options = PlanOptions(num_microbatches=16 * nodes, **FREE)
        cluster = _nodes(nodes, 32).without(*lost)
        name = f"{layers} layers, {8 * nodes} devices without {len(lost)}"
        yield Case(name, uneven_profile(layers, 5), cluster, options)


def _branches() -> Iterator[Case]:
    drawn = {
        "U-Net": unet(5), "Inception": inception(4), "two towers": towers(12),
        "BERT operators": bert(3), "series-parallel": series_parallel(60, 0),
    }  # fmt: skip
    for name, (count, pairs) in drawn.items():
        for asked in ({}, {"max_replicas": None}):
            options = PlanOptions(num_microbatches=16, layer_order="any", **asked)
            cluster = Cluster.uniform(8, memory_bytes=80 * 2**30, bandwidth_bytes_per_s=12e9)
            free = ", free" * bool(asked)
            yield Case(f"{name}{free}", profile_of(count, pairs), cluster, options)
    for name in ("U-Net", "two towers"):
        options = PlanOptions(num_microbatches=16, skips="direct", **FREE)
        cluster = Cluster.uniform(8, bandwidth_bytes_per_s=1e9)
        yield Case(f"{name}, direct", profile_of(*drawn[name]), cluster, options)


def _large() -> Iterator[Case]:
    """Many layers or devices, among them chains with more positions than tables have room for."""
    for layers, nodes, memory_gb, gap in (
        (200, 8, 40, 1e-4), (200, 64, 40, 1e-4), (200, 512, 40, 1e-4), (400, 2, 80, 1e-3),
        (200, 64, 32, 1e-4), (1_200, 2, 200, 1e-2), (1_500, 8, 32, 1e-2),
    ):  # fmt: skip
        options = PlanOptions(num_microbatches=16 * nodes, gap=gap, **FREE)
        name = f"{layers} layers, {8 * nodes} devices of {memory_gb} GB"
        yield Case(name, uneven_profile(layers, nodes), _nodes(nodes, memory_gb), options)
