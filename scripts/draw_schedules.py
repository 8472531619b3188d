"""Draw each schedule's step for docs/concepts/schedules.md.

usage: python scripts/draw_schedules.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import stagewright
from stagewright.formats.svg import timeline_svg
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.schedules.traits import ONE_STAGE_A_RANK, SEVERAL_STAGES

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "schedules"
NAMES = [name for name in ONE_STAGE_A_RANK + SEVERAL_STAGES if name != "forward_only"]
CLUSTER = stagewright.Cluster.parse("4xH100")


def draw(folder: Path) -> None:
    """Write an SVG for every schedule: 16 equal layers, 4 devices, 8 micro-batches."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(16)])
        profile = stagewright.estimate(model, torch.empty(2048, 16384), device="H100")
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        num_stages = 4 if name in ONE_STAGE_A_RANK else 8
        options = stagewright.PlanOptions(num_microbatches=8, schedule=name, num_stages=num_stages)
        plan = stagewright.plan(profile, CLUSTER, options)
        (folder / f"{name}.svg").write_text(timeline_svg(plan, plan_timeline(plan)))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
