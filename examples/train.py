"""Train a planned model, in plain PyTorch: across processes under torchrun, or in one.

From the folder that holds ``examples/``::

    stagewright profile examples.train:build_model --sample examples.train:make_batch
    stagewright plan profile.json --devices 2xcpu -o plan.json
    torchrun --nproc-per-node 2 examples/train.py plan.json
    python examples/train.py plan.json
"""

import os
import sys

import torch
from torch.nn.functional import cross_entropy

import stagewright


def build_model() -> torch.nn.Module:
    """The model the plan was made for, the same on every rank."""
    hidden = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8)]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(256, 10))


def make_batch(size: int = 4) -> torch.Tensor:
    """One micro-batch; the plan's batch is as many of these as it has micro-batches."""
    return torch.randn(size, 256)


def main() -> None:
    if "RANK" in os.environ:  # torchrun's
        stagewright.init_process_group(timeout_s=60)
    plan = stagewright.Plan.read(sys.argv[1])
    with torch.device("meta"):  # no memory for the whole model on any rank
        model = build_model()
    training = stagewright.build(
        plan, model, loss_fn=cross_entropy, weights=stagewright.Weights(seed=0), max_norm=1.0
    )
    optimizer = training.optimizer(torch.optim.AdamW, lr=1e-3)
    size = plan.inputs[0].shape[0] * plan.num_microbatches
    for step in range(5):
        torch.manual_seed(step)
        loss = training.step(make_batch(size), target=torch.randint(0, 10, (size,)))
        training.update(optimizer)
        if loss is not None:  # where the last stage is
            print(f"step {step}: loss {loss:.4f}")
    training.close()
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
