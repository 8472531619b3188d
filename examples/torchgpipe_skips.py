"""A script as one writes it for torchgpipe; the imports are all that changes.

    python examples/torchgpipe_skips.py
    python examples/torchgpipe_skips.py --original    # with torchgpipe itself, if installed

A small U-Net with a long skip connection, batch normalisation and dropout, in two
partitions and four micro-batches. Both print the same losses.
"""

import sys
from collections.abc import Generator

import torch
from torch import nn

if "--original" in sys.argv:
    from torchgpipe import GPipe
    from torchgpipe.skip import pop, skippable, stash
else:
    from stagewright.torchgpipe import GPipe
    from stagewright.torchgpipe.skip import pop, skippable, stash


@skippable(stash=["wide"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Generator[stash, None, torch.Tensor]:
        wide = self.conv(x).relu()
        yield stash("wide", wide)
        return nn.functional.max_pool2d(wide, 2)


@skippable(pop=["wide"])
class Up(nn.Module):
    def forward(self, x: torch.Tensor) -> Generator[pop, torch.Tensor, torch.Tensor]:
        wide = yield pop("wide")
        return torch.cat([wide, nn.functional.interpolate(x, scale_factor=2)], 1)


def main() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        Down(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(16, 8, 1),
        Up(),
        nn.Conv2d(16, 1, 1),
    )
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    model = GPipe(layers, [4, 4], devices=devices, chunks=4, deferred_batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(5):
        x = torch.rand(10, 1, 16, 16, device=model.devices[0])
        target = x.mean((2, 3), keepdim=True).to(model.devices[-1])
        optimizer.zero_grad()
        loss = (model(x) - target).abs().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        print(f"evaluation: {model(x).mean().item():.6f}")


if __name__ == "__main__":
    main()
