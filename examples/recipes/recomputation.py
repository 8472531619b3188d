"""GPipe with recomputation: stages keep their inputs alone, and run forward again in the backward.

torchrun --nproc-per-node 4 examples/recipes/recomputation.py
"""

import torch
from against_unsplit import train
from torch import nn

import stagewright


def build_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*hidden, nn.Linear(16, 8)).double()


def make_plan(ranks: int) -> stagewright.Plan:
    """As many stages as ranks, and twice as many micro-batches."""
    profile = stagewright.profile(build_model(), torch.randn(4, 16).double())
    options = stagewright.PlanOptions(
        num_stages=ranks, num_microbatches=2 * ranks, schedule="gpipe", recompute="always"
    )
    return stagewright.plan(profile, f"{ranks}xcpu", options)


if __name__ == "__main__":
    train(build_model, make_plan)
