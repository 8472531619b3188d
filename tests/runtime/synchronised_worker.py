"""Two replicas with synchronised batch statistics, against the model on batches of two."""

from __future__ import annotations

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from stagewright.core.errors import PlanMismatch
from stagewright.runtime.distributed import DistributedPipeline
from tests.runtime.equality_worker import largest, plan_of
from tests.runtime.forked import run_forked
from tests.torch_models import Case, traced_profile

DOUBLE = torch.float64
VARIANTS = [
    {"stages": 1, "replicas": [2], "schedule": "1f1b"},
    {"stages": 1, "replicas": [2], "schedule": "gpipe", "recompute": "always"},
    {"stages": 1, "replicas": [2], "schedule": "zero_bubble"},
    {"stages": 2, "replicas": [2, 2], "chunks": 2, "schedule": "zbv"},
    {"stages": 1, "replicas": [2], "schedule": "1f1b", "microbatches": 3},
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(64, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3),
    ).double()  # fmt: skip


def compare(variant: dict) -> dict[str, object]:
    case = Case("own", None, net(), torch.randn(2, 3, 8, 8, dtype=DOUBLE), cross_entropy)
    plan = plan_of(variant, traced_profile(case), DOUBLE)
    whole = copy.deepcopy(case.model)
    try:
        pipeline = DistributedPipeline(
            case.model, plan, loss_fn=cross_entropy, batch_statistics="synchronised"
        )
    except PlanMismatch as refusal:
        return {"variant": variant, "refused": str(refusal)}
    torch.manual_seed(1)
    batch, target = torch.randn(8, 3, 8, 8, dtype=DOUBLE), torch.randint(0, 3, (8,))
    loss = pipeline.step(batch, target=target)
    for part, wanted in zip(batch.chunk(2), target.chunk(2), strict=True):
        (cross_entropy(whole(part), wanted) / 2).backward()
    found = {
        "variant": variant,
        "loss": loss is not None,
        "gradients": largest(
            {name: p.grad for name, p in pipeline.module.named_parameters()},
            {name: p.grad for name, p in whole.named_parameters()},
        ),
        "buffers": largest(
            dict(pipeline.module.named_buffers()), dict(whole.named_buffers())
        ),
    }  # fmt: skip
    pipeline.train(False)
    output, _ = pipeline.evaluate(batch)
    with torch.no_grad():
        expected = whole.eval()(batch)
    found["outputs"] = 0.0 if output is None else float((output - expected).abs().max())
    case.model.train()(batch)  # by itself it waits for nobody
    pipeline.close()
    return found


def one_rank() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = [compare(variant) for variant in VARIANTS]
    file = Path(sys.argv[1]) / f"{dist.get_rank()}.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_forked(2, one_rank)
