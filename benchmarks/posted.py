"""Steps and memory that others posted of their runs, beside what is predicted for them.

    python benchmarks/posted.py --write

The runs, with the settings that were stated or had to be assumed, are in
`published/posted_steps.csv` and `published/posted_memory.csv`. Each is cut as it was run and priced
by the planner's simulator on an estimated profile. With ``--write`` the page has the tables, and
plans of pipelines the band that the posted ones kept to.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from published_recipes import equal_blocks
from tables import escaped, markdown_table, write_between_marks

from stagewright.cli.support.named_models import read_model
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.cluster.reserves import MemoryReserves
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.estimates.cluster_estimate import ClusterEstimate
from stagewright.profiler.estimates.for_cluster import estimate_for_cluster

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "benchmarks" / "published"
PAGE = ROOT / "docs" / "evidence" / "posted.md"
BAND = ROOT / "core" / "plan" / "assumptions.py"

Row = Mapping[str, str]


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the runs in a file of `published`."""
    with (PUBLISHED / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@cache
def estimate(
    model: str, cluster: str, microbatch: int, tokens: int, precision: Any
) -> ClusterEstimate:
    name, _, config = model.partition(" ")
    spec, sample = read_model(name, config or None, microbatch, tokens)
    return estimate_for_cluster(spec, sample, Cluster.parse(cluster), precision=precision)


def price(row: Row) -> Plan:
    """Return a run as a plan on devices without a limit of memory, in equally many blocks."""
    asked = (row["model"], row["cluster"], int(row["microbatch"]), int(row["tokens"]))
    made = estimate(*asked, row["precision"])
    options = PlanOptions.model_validate(
        {
            "num_microbatches": int(row["microbatches"]),
            "max_replicas": None,
            "recompute": row["recompute"],
            "tensor": int(row["tensor"]),
            "precision": row["precision"],
            "strategies": (row["sharing"],),
        }
    )
    free = tuple(each.model_copy(update={"memory_bytes": None}) for each in made.cluster.devices)
    cluster = made.cluster.model_copy(update={"devices": free})
    balance = equal_blocks(made.profile, int(row["stages"]))
    replicas = [int(row["replicas"])] * len(balance)
    return plan_from_balance(made.profile, cluster, options, balance, replicas=replicas)


@dataclass(frozen=True)
class Step:
    """A posted step beside its prediction; ``band`` is that of unsplit steps."""

    row: Row
    predicted_s: float
    band: float

    @property
    def ratio(self) -> float:
        """How many times as long as predicted it took."""
        return float(self.row["measured_s"]) / self.predicted_s

    @property
    def is_pipeline(self) -> bool:
        return int(self.row["stages"]) > 1

    def is_inside(self, pipelines: tuple[float, float]) -> bool:
        """Return True if it is inside the band that a plan of it prints."""
        if self.is_pipeline:
            return pipelines[0] <= self.ratio <= pipelines[1]
        return abs(1 / self.ratio - 1) <= self.band


def find_band(steps: Iterable[Step]) -> tuple[int, float, float]:
    """Return how many pipelines there are, and their least and most multiples, rounded outwards."""
    ratios = sorted(step.ratio for step in steps if step.is_pipeline)
    return len(ratios), int(ratios[0] * 100) / 100, -int(-ratios[-1] * 10 - 1) / 10


def format_steps(steps: Sequence[Step]) -> str:
    number, *band = find_band(steps)
    pipelines = (band[0], band[1])
    inside = {kind: [] for kind in (False, True)}  # type: dict[bool, list[bool]]
    rows = []
    for step in steps:
        row, is_inside = step.row, step.is_inside(pipelines)
        inside[step.is_pipeline].append(is_inside)
        printed = f"x {band[0]} to {band[1]}" if step.is_pipeline else f"&plusmn;{step.band:.0%}"
        rows.append(
            [
                f"{row['source']}: {row['name']}", row["cluster"],
                f"{row['tensor']} x {row['replicas']} x {row['stages']}",
                f"{row['microbatches']} x {row['microbatch']} x {row['tokens']}",
                row["precision"], row["measured_s"], f"{step.predicted_s:.3g}",
                f"{step.ratio:.2f}", printed, "yes" if is_inside else "no", row["remark"],
            ]
        )  # fmt: skip
    head = [
        "run", "devices", "tensor x replicas x stages", "micro-batches x samples x tokens",
        "precision", "measured, s", "predicted, s", "took times as long", "printed band", "inside",
        "remark",
    ]  # fmt: skip
    single, several = inside[False], inside[True]
    text = (
        f"Inside the printed band: {sum(single)} of {len(single)} steps of one stage, "
        f"{sum(several)} of {number} of pipelines (by construction: their band is of these rows). "
        f"Within the band of unsplit steps: "
        f"{sum(abs(1 / step.ratio - 1) <= step.band for step in steps)} of {len(steps)}."
    )
    return f"{markdown_table(head, rows, left=5)}\n\n{text}"


UNITS = {"GB": 1e9, "GiB": 2.0**30}


def format_memory(row: Row) -> tuple[list[object], list[float]]:
    """Return a line of the table, and how many times as much as predicted was measured."""
    posted = f"{row['measured']} {row['unit']}".strip()
    if not row["model"]:
        return [row["run"], "", "", escaped(posted), "", "", "", row["remark"]], []
    made = price(row)
    kind = Cluster.parse(row["cluster"]).devices[0]
    memory_bytes = estimate(
        row["model"], row["cluster"], int(row["microbatch"]), int(row["tokens"]), row["precision"]
    ).cluster.devices[0].memory_bytes or 0  # fmt: skip
    reserves = made.options.reserves or MemoryReserves()
    reserved = reserves.of_device(memory_bytes).total_bytes
    held = [stage.memory.total_bytes for stage in made.stages]
    whole = [each + reserved for each in held]
    ratios: list[float] = []
    if row["counted"] == "verdict":
        fits = "fits" if max(whole) <= memory_bytes else "does not fit"
        found = f"{fits}: agrees" if fits == row["measured"] else f"{fits}: DISAGREES"
    else:
        counted = whole if row["counted"] == "device" else held
        measured = [float(text) * UNITS[row["unit"]] for text in row["measured"].split()]
        compared = counted if len(measured) == len(counted) else [max(counted)]
        ratios = [one / other for one, other in zip(measured, compared, strict=True)]
        found = " ".join(f"{ratio:.2f}" for ratio in ratios)
    sizes = (" ".join(f"{each / 2**30:.1f}" for each in sizes) for sizes in (held, whole))
    layout = f"{row['tensor']} x {row['replicas']} x {row['stages']}"
    shown = f"{len(Cluster.parse(row['cluster']).devices)} x {kind.kind}"
    return [row["run"], shown, layout, posted, *sizes, found, row["remark"]], ratios


def format_all_memory(rows: Iterable[Row]) -> str:
    lines, ratios = [], []
    for row in rows:
        line, found = format_memory(row)
        lines.append(line)
        ratios += found
        print(line, file=sys.stderr, flush=True)
    head = [
        "run", "devices", "tensor x replicas x stages", "posted", "planned, GiB",
        "with reserves, GiB", "took times as much", "remark",
    ]  # fmt: skip
    close = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    above = sum(ratio > 1 for ratio in ratios)
    text = f"Within 10 %: {close} of {len(ratios)} figures; more than planned: {above}."
    return f"{markdown_table(head, lines, left=3)}\n\n{text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page and the band")
    write = parser.parse_args().write
    steps = []
    for row in read_rows("posted_steps.csv"):
        made = price(row)
        steps.append(Step(row, made.step_time_s, made.error_band or 0.0))
        print(row["name"], row["measured_s"], made.step_time_s, file=sys.stderr, flush=True)
    memory = format_all_memory(read_rows("posted_memory.csv"))
    text = f"## Steps\n\n{format_steps(steps)}\n\n## Memory\n\n{memory}"
    print(text)
    if write:
        write_between_marks(PAGE, "posted.py", text)
        found = "PostedSteps({}, {}, {})".format(*find_band(steps))
        code = BAND.read_text(encoding="utf-8")
        BAND.write_text(re.sub(r"PostedSteps\(\d.*\)", found, code), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
