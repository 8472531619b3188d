"""A ResNeXt block split over ranks: each convolves its own groups, and its part of other channels.

Channels are whole again where the last convolution sums over them::

    torchrun --nproc-per-node 4 examples/recipes/grouped_convolution.py
"""

import torch
from against_unsplit import train
from torch import Tensor, nn

import stagewright
from stagewright.planner.price_split import plan_from_balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.grouped(self.narrow(images).relu()).relu()
        return self.widen(hidden).mean((2, 3))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Block().double()


def make_plan(ranks: int) -> stagewright.Plan:
    profile = stagewright.profile(build_model(), torch.randn(4, 3, 6, 6).double())
    plan = plan_from_balance(profile, "1xcpu", None, [len(profile.layers)])
    split = {"tensor": ranks, "devices": tuple(f"cpu:{rank}" for rank in range(ranks))}
    return plan.model_copy(update={"stages": (plan.stages[0].model_copy(update=split),)})


if __name__ == "__main__":
    train(build_model, make_plan)
