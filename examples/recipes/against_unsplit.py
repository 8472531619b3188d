"""The training loop of the recipes: a parallel model beside the unsplit one, on equal batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import stagewright
from stagewright.runtime.elastic import plan_for_world


def train(
    build_model: Callable[[], torch.nn.Module],
    make_plan: Callable[[int], stagewright.Plan],
    updates: int = 3,
    **options: Any,
) -> None:
    """Train both models, and print each loss beside how far the two are apart."""
    stagewright.init_process_group(backend="gloo", timeout_s=60)
    plan, unsplit = plan_for_world(make_plan), build_model()
    shape = plan.num_microbatches * plan.inputs[0].shape[0], *plan.inputs[0].shape[1:]
    accumulate = options.get("accumulate", 1)
    with stagewright.build(plan, build_model(), loss_fn=cross_entropy, **options) as training:
        ours = training.optimizer(torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(unsplit.parameters(), lr=0.1)
        for step in range(updates * accumulate):
            batch = torch.randn(shape, generator=torch.Generator().manual_seed(step)).double()
            target = batch.flatten(1)[:, :8].argmax(1)
            loss = training.step(batch, target=target)
            training.update(ours)
            expected = cross_entropy(unsplit(batch), target)
            (expected / accumulate).backward()
            if (step + 1) % accumulate == 0:
                theirs.step(), theirs.zero_grad()
            if dist.get_rank() == dist.get_world_size() - 1:  # which holds the last stage
                apart = abs(loss - expected).item()
                print(f"step {step}: loss {loss:.6f}, {apart:.0e} apart")
    dist.destroy_process_group()
