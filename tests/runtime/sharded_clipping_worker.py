"""Two ranks with a tensor-parallel weight clip by the norm of the whole; prints what they made."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.replicas.clip_grad import clipping_factor, scale_gradients
from stagewright.runtime.training import LocalRunner
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import Case, make_plan


def one_rank() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model, loss_fn = nn.Sequential(nn.Linear(2, 2, bias=False)), nn.MSELoss()
    plan = make_plan(Case("plain", None, model, (torch.ones(2, 2),), loss_fn), 1)
    pipeline = Pipeline(model, plan)
    # Rows of 3 on rank 0 and of 4 on rank 1, so that the norms of the shards differ.
    gradient = torch.tensor([[3.0, 3.0], [4.0, 4.0]])
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    model[0].weight = weight
    norm = float(LocalRunner(pipeline, loss_fn).gradient_norm())
    scale_gradients([weight], clipping_factor(norm, 1.0))
    whole = weight.grad.full_tensor()  # type: ignore[attr-defined]
    print_line({"rank": dist.get_rank(), "norm": norm, "clipped": whole.tolist()})
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(2, one_rank)
