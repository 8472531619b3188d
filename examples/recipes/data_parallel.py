"""Data parallelism with accumulation: gradients are summed in buckets, once in four steps.

The sums overlap the backward of the last step; the three before it wait for nobody::

    torchrun --nproc-per-node 4 examples/recipes/data_parallel.py
"""

import torch
from against_unsplit import train
from torch import nn

import stagewright
from stagewright.planner.price_split import plan_from_balance

OPTIONS = {"strategy": "ddp", "accumulate": 4}


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
