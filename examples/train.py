"""Train a planned model under torchrun, in plain PyTorch.

From the folder that holds ``examples/``::

    stagewright profile examples.train:build_model --sample examples.train:make_batch
    stagewright plan profile.json --devices 2xcpu -o plan.json
    torchrun --nproc-per-node 2 examples/train.py plan.json
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from stagewright import DistributedPipeline, Plan
from stagewright.runtime.process_group import init_process_group


def build_model() -> torch.nn.Module:
    """The model the plan was made for, the same on every rank."""
    torch.manual_seed(0)
    width, layers = 256, []
    for _ in range(8):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def make_batch(size: int = 4) -> torch.Tensor:
    """One micro-batch; the plan's batch is as many of these as it has micro-batches."""
    return torch.randn(size, 256)


def main() -> None:
    plan = Plan.read(sys.argv[1])
    init_process_group(timeout_s=60)
    pipeline = DistributedPipeline(build_model(), plan, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-3)
    size = plan.inputs[0].shape[0] * plan.num_microbatches
    for step in range(5):
        torch.manual_seed(step)
        batch, target = torch.randn(size, 256), torch.randint(0, 10, (size,))
        loss = pipeline.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            print(f"step {step}: loss {loss:.4f}")
    pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
