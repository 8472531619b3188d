"""Data parallelism in one process: replicas in threads, shares of a batch by speed.

python examples/recipes/one_process.py
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stagewright.runtime.data_parallel import DataParallel


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    unsplit = copy.deepcopy(model)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu", "cpu"]
    model.to(devices[0])
    speeds = [2.0, *[1.0] * (len(devices) - 1)]  # the first takes twice as many samples
    parallel = DataParallel(model, devices, loss_fn=cross_entropy, speeds=speeds)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    for step in range(3):
        batch, target = torch.randn(32, 16).double(), torch.randint(0, 8, (32,))
        loss = parallel.step(batch, target=target)
        expected = cross_entropy(unsplit(batch), target)
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        apart = abs(loss.cpu() - expected.detach()).item()
        print(f"step {step}: loss {loss:.6f}, {apart:.0e} apart")


if __name__ == "__main__":
    main()
