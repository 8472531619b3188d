"""Compare plans with equal layers, torchgpipe's balance and PipeDream's plan.

    python benchmarks/gains.py [--profiles FOLDER] [--write docs/evidence/gains.md] [--json]

Seven models (`models.py`), 4 and 8 devices, without and with a limit on memory, three links. Every
column of a row plans the same profile, and every step is simulated by the same simulator.
Profiles that the folder lacks are measured and kept there; with the ones kept here the table is
the one in docs/evidence/gains.md anywhere, without torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tables import markdown_table, write_between_marks

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.core.units import format_bytes, format_time
from stagewright.planner.cost.chain import legal_positions
from stagewright.planner.heuristics.published_rules import (
    equal_layers,
    pipedream_plan,
    torchgpipe_balance,
)
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance

MODELS = {
    "gpt2": "GPT-2 small",
    "resnet50": "ResNet-50",
    "unet": "U-Net",
    "inception": "Inception (GoogLeNet)",
    "moe": "mixture of experts",
    "two_tower": "two towers",
    "vgg": "VGG-16",
}
DEVICES = (4, 8)
MICROBATCHES = 16
BUDGET_S = 20.0
"""Of repeated measurement for each model."""


@dataclass(frozen=True)
class Link:
    """Joins all devices of a cluster."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def cluster(self, devices: int, memory_bytes: int | None = None) -> Cluster:
        return Cluster.uniform(
            devices,
            memory_bytes=memory_bytes,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )


LINKS = (
    Link("1 Gbit/s, 50 us", 0.125e9, 50e-6),
    Link("10 Gbit/s, 50 us", 1.25e9, 50e-6),
    Link("12 GB/s, 10 us", 12e9, 10e-6),
)
"""Of the first the table is written, of all a summary."""


@dataclass(frozen=True)
class Way:
    """One way to plan, simulated; no time if it does not fit the devices.

    Attributes:
        balance: Layers of each stage.
        replicas: Devices of each stage.
        peak_bytes: Of the device that needs most.
        recomputed: Stages that recompute their activations.
    """

    balance: tuple[int, ...]
    replicas: tuple[int, ...]
    step_time_s: float | None = None
    peak_bytes: int | None = None
    recomputed: int = 0


@dataclass(frozen=True)
class Row:
    """All ways for one model on one cluster."""

    model: str
    devices: int
    link: str
    memory_bytes: int | None
    equal_layers: Way
    torchgpipe: Way
    pipedream: Way
    copies: Way
    plan: Way
    plan_free: Way

    def gain(self, ours: Way, other: Way) -> float | None:
        """Return the relative gain: 0.1 where the other plan's step takes 10 % longer."""
        if ours.step_time_s is None or other.step_time_s is None:
            return None
        return other.step_time_s / ours.step_time_s - 1


def rows(profiles: dict[str, Profile], link: Link) -> Iterator[Row]:
    for limited in (False, True):
        for name, profile in profiles.items():
            for devices in DEVICES:
                memory_bytes = tight_memory(profile, devices, link) if limited else None
                yield row(name, profile, link, link.cluster(devices, memory_bytes))


def row(name: str, profile: Profile, link: Link, cluster: Cluster) -> Row:
    devices = len(cluster.devices)
    positions = legal_positions(profile)
    times_s = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
    pipedream = pipedream_plan(profile, devices, link.bandwidth_bytes_per_s, positions)
    if pipedream is None:
        raise AssertionError("these models and clusters are within PipeDream's limits")
    alone = PlanOptions(num_microbatches=MICROBATCHES)
    free = PlanOptions(num_microbatches=MICROBATCHES, max_replicas=None, recompute="auto")
    return Row(
        name,
        devices,
        link.name,
        cluster.devices[0].memory_bytes,
        given(profile, cluster, equal_layers(len(times_s), devices, positions)),
        given(profile, cluster, torchgpipe_balance(times_s, devices, positions)),
        given(profile, cluster, *pipedream),
        given(profile, cluster, [len(times_s)], [devices]),
        planned(profile, cluster, alone),
        planned(profile, cluster, free),
    )


def tight_memory(profile: Profile, devices: int, link: Link) -> int:
    """Halfway between what equal layers need and the least that any split needs."""
    cluster = link.cluster(devices)
    counts = equal_layers(len(profile.layers), devices, legal_positions(profile))
    options = PlanOptions(num_microbatches=MICROBATCHES, objective="memory")
    needs = given(profile, cluster, counts).peak_bytes
    least = planned(profile, cluster, options).peak_bytes
    if needs is None or least is None:
        raise AssertionError("without a limit everything fits")
    return (needs + least) // 2


def given(
    profile: Profile, cluster: Cluster, counts: Sequence[int], replicas: Sequence[int] = ()
) -> Way:
    """Price a split that another planner chose. Stages without layers take no device."""
    balance = tuple(count for count in counts if count)
    options = PlanOptions(num_microbatches=MICROBATCHES)
    try:
        return outcome(plan_from_balance(profile, cluster, options, balance, replicas=replicas))
    except Infeasible:
        return Way(balance, tuple(replicas) or (1,) * len(balance))


def planned(profile: Profile, cluster: Cluster, options: PlanOptions) -> Way:
    try:
        return outcome(plan(profile, cluster, options))
    except Infeasible:
        return Way((), ())


def outcome(made: Plan) -> Way:
    return Way(
        made.balance,
        tuple(stage.replicas for stage in made.stages),
        made.step_time_s,
        max(stage.memory.total_bytes for stage in made.stages),
        sum(stage.recompute != "never" for stage in made.stages),
    )


def read_or_measure(folder: Path) -> dict[str, Profile]:
    """Every model's profile, measured now where the folder has none."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in MODELS:
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"measuring {name}", file=sys.stderr)
            path.write_text(measured(name).to_json() + "\n", encoding="utf-8")
        found[name] = Profile.read(path)
    return found


def measured(name: str) -> Profile:
    """On one core: a device of the plans is one core."""
    import models
    import torch

    from stagewright.profiler.measure.profile import profile

    torch.manual_seed(0)
    case = models.MODELS[name]()
    return profile(
        case.model,
        case.sample,
        options=ProfilingOptions(device="cpu", num_threads=1, budget_s=BUDGET_S),
        loss_fn=case.loss_fn,
        target=case.target,
    )


HEAD = (
    "model",
    "devices",
    "memory",
    "equal layers",
    "torchgpipe",
    "PipeDream",
    "copies",
    "plan",
    "plan+",
    "plan over equal",
    "plan over torchgpipe",
    "plan+ over equal",
    "plan+ over torchgpipe",
    "plan+ over PipeDream",
    "plan+ over copies",
    "plan+ devices a stage",
)
WAYS, GAINS = HEAD[3:9], HEAD[9:15]


def table(found: Sequence[Row]) -> str:
    rows = [
        (
            MODELS[entry.model],
            entry.devices,
            "no limit" if entry.memory_bytes is None else format_bytes(entry.memory_bytes),
            *map(step_time, ways(entry)),
            *("" if gain is None else f"{gain:.1%}" for gain in gains(entry)),
            stages(entry.plan_free),
        )
        for entry in found
    ]
    return markdown_table(HEAD, rows)


def step_time(way: Way) -> str:
    return "does not fit" if way.step_time_s is None else format_time(way.step_time_s)


def stages(way: Way) -> str:
    recomputed = f", {way.recomputed} recomputed" if way.recomputed else ""
    return " ".join(map(str, way.replicas)) + recomputed


def ways(entry: Row) -> tuple[Way, ...]:
    """In the order of `WAYS`."""
    return (
        entry.equal_layers,
        entry.torchgpipe,
        entry.pipedream,
        entry.copies,
        entry.plan,
        entry.plan_free,
    )


def gains(entry: Row) -> tuple[float | None, ...]:
    """In the order of `GAINS`."""
    return (
        entry.gain(entry.plan, entry.equal_layers),
        entry.gain(entry.plan, entry.torchgpipe),
        entry.gain(entry.plan_free, entry.equal_layers),
        entry.gain(entry.plan_free, entry.torchgpipe),
        entry.gain(entry.plan_free, entry.pipedream),
        entry.gain(entry.plan_free, entry.copies),
    )


def summary(found: Sequence[Row]) -> str:
    """Median, least and largest of every gain, and how many fit where memory is short."""
    lines = []
    for title, column in zip(GAINS, zip(*map(gains, found), strict=True), strict=True):
        values = [gain for gain in column if gain is not None]
        lines.append(
            f"- {title}: median {statistics.median(values):.1%}, from {min(values):.1%} to "
            f"{max(values):.1%} ({len(values)} rows)"
        )
    limited = [entry for entry in found if entry.memory_bytes is not None]
    fitting = [
        sum(way.step_time_s is not None for way in column)
        for column in zip(*map(ways, limited), strict=True)
    ]
    fit = [f"{title} {count}" for title, count in zip(WAYS, fitting, strict=True)]
    lines.append(f"- of the {len(limited)} rows with a limit on memory fit: {', '.join(fit)}")
    whole = sum(len(entry.plan_free.replicas) == 1 for entry in found)
    lines.append(f"- plan+ is a single stage, the whole model on every device, in {whole} rows")
    changes = [entry.gain(entry.plan_free, entry.plan) for entry in found]
    losses = [-change for change in changes if change is not None and change < 0]
    if losses:
        lines.append(
            f"- plan+ is slower than plan in {len(losses)} of the rows, by at most "
            f"{max(losses):.1%}: the search minimises a model of the step, not the simulated step"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parent / "profiles")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    profiles = read_or_measure(arguments.profiles)
    sections = []
    for number, link in enumerate(LINKS):
        found = []
        for entry in rows(profiles, link):
            found.append(entry)
            if arguments.json:
                print(json.dumps(asdict(entry)), flush=True)
        body = summary(found) if number else f"{table(found)}\n\n{summary(found)}"
        sections.append(f"## {link.name}\n\n{body}")
    text = "\n\n".join(sections)
    if arguments.write:
        write_between_marks(arguments.write, "gains.py", text)
    if not arguments.json:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
