"""Parameter parallelism: each rank keeps its share of every weight, gradient and optimizer state.

Weights are all-gathered for the step, gradients reduce-scattered after it::

    torchrun --nproc-per-node 4 examples/recipes/parameter_parallel.py
"""

import torch
from against_unsplit import train
from torch import nn

import stagewright
from stagewright.planner.price_split import plan_from_balance

OPTIONS = {"strategy": "fully_shard"}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).double()


def make_plan(ranks: int) -> stagewright.Plan:
    """One stage of three layers, on all ranks, with a micro-batch each."""
    profile = stagewright.profile(build_model(), torch.randn(4, 16).double())
    options = stagewright.PlanOptions(num_microbatches=ranks)
    return plan_from_balance(profile, f"{ranks}xcpu", options, [3], replicas=[ranks])


if __name__ == "__main__":
    train(build_model, make_plan, **OPTIONS)
