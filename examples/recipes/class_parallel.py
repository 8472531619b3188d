"""Fully connected layers split over ranks: hidden units of the first two, classes of the last.

Each rank multiplies by its part of a weight and holds no other::

    torchrun --nproc-per-node 4 examples/recipes/class_parallel.py
    torchrun --nproc-per-node 4 examples/recipes/class_parallel.py --data 2  # replicas of 2 ranks
"""

import sys

import torch
from against_unsplit import train
from torch import nn

import stagewright
from stagewright.planner.price_split import plan_from_balance


def build_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(16, 8)).double()


def make_plan(ranks: int, replicas: int = 1) -> stagewright.Plan:
    """One stage; device ``replica * parts + part`` has that part of that replica's layers."""
    profile = stagewright.profile(build_model(), torch.randn(4, 16).double())
    options = stagewright.PlanOptions(num_microbatches=replicas)
    plan = plan_from_balance(profile, f"{replicas}xcpu", options, [5], replicas=[replicas])
    devices = tuple(f"cpu:{rank}" for rank in range(ranks))
    split = {"tensor": ranks // replicas, "devices": devices}
    return plan.model_copy(update={"stages": (plan.stages[0].model_copy(update=split),)})


if __name__ == "__main__":
    replicas = int(sys.argv[2]) if sys.argv[1:2] == ["--data"] else 1
    train(build_model, lambda ranks: make_plan(ranks, replicas))
