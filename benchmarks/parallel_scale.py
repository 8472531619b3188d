"""Time the planning of large models over tensor x data x pipeline x shared parameters.

    python benchmarks/parallel_scale.py --folder /tmp/recipes --write docs/evidence/recipes.md

Profiles are estimates for H100s in nodes of 8. Printed for each row: the plan (tensor x replicas x
stages), its step, how far the step and the closed form may be from the best, and the processor
time of planning. Exits with 1 if a row takes longer than its limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from published_recipes import Recipe, estimate, shape
from tables import markdown_table, write_between_marks

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan


class Row(NamedTuple):
    """A model, nodes of 8 GPUs, micro-batches of one sample, and the seconds that are allowed."""

    model: str
    sequence: int
    nodes: int
    microbatches: int
    tensor: int | Literal["auto"]
    limit_s: float


ROWS = (
    Row("llama-3.1-8b", 4096, 1, 64, "auto", 30),
    Row("llama-3.1-70b", 4096, 64, 512, "auto", 30),
    Row("llama-3.1-405b", 4096, 512, 1024, "auto", 60),
    Row("llama-3.1-405b", 4096, 2048, 2048, 8, 60),
)


def run(row: Row, folder: Path) -> tuple[list[str], bool]:
    """Return the cells of a row, and whether it kept its limit."""
    source = Recipe(
        "", f"{row.model} {row.sequence}", row.model, "", "H100", row.sequence, 1, 1, 1, 1, 1, 0
    )
    profile = estimate(source, folder)
    cluster = Cluster.parse(f"{row.nodes}x8xH100")
    options = PlanOptions(
        num_microbatches=row.microbatches,
        max_replicas=None,
        recompute="auto",
        tensor=row.tensor,
        strategies=("replicate", "zero1", "fully_shard"),
        precision="bf16_mixed",
    )
    began = time.process_time()
    found = plan(profile, cluster, options, deadline_s=0.9 * row.limit_s)
    took_s = time.process_time() - began
    strategies = {stage.strategy for stage in found.stages} - {"single"}
    cells = [
        row.model, f"{row.nodes * 8:,}", str(row.microbatches), str(row.tensor), shape(found),
        ", ".join(sorted(strategies)) or "single", f"{found.step_time_s:.2f} s",
        f"{found.proof.gap:.0%}", f"{took_s:.1f} s",
    ]  # fmt: skip
    return cells, took_s <= row.limit_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where estimates are kept")
    parser.add_argument("--write", type=Path, help="a document with marks for the table")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for row in ROWS:
        found.append(run(row, arguments.folder))
        print(found[-1][0], file=sys.stderr, flush=True)
    heads = [
        "model", "GPUs", "micro-batches", "tensor asked", "tensor x replicas x stages", "shared",
        "step", "gap", "planning",
    ]  # fmt: skip
    text = markdown_table(heads, [cells for cells, _ in found])
    if arguments.write:
        write_between_marks(arguments.write, "parallel_scale.py", text)
    print(text)
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
