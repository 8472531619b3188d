"""Inference through stages on several ranks: one batch after the other, or many under way.

The first is simple model parallelism: one rank works while the others wait. The second is the
pipeline: each stage begins with the next batch as soon as it has passed one on::

    torchrun --nproc-per-node 4 examples/recipes/stages_in_order.py
"""

import time

import torch
import torch.distributed as dist
from recomputation import build_model

import stagewright
from stagewright.runtime.elastic import plan_for_world


def make_plan(ranks: int) -> stagewright.Plan:
    profile = stagewright.profile(build_model(), torch.randn(4, 16).double())
    options = stagewright.PlanOptions(num_stages=ranks, objective="throughput", schedule="gpipe")
    return stagewright.plan(stagewright.for_inference(profile), f"{ranks}xcpu", options)


if __name__ == "__main__":
    stagewright.init_process_group(backend="gloo", timeout_s=60)
    plan, model, unsplit = plan_for_world(make_plan), build_model(), build_model()
    batches = [torch.randn(4, 16).double() for _ in range(20)]
    with stagewright.DistributedInferencePipeline(model, plan) as pipeline, torch.no_grad():
        if pipeline.rank == 0:  # the other ranks serve until it is closed
            expected = [unsplit(batch) for batch in batches]
            for name, serve in {
                "in order": lambda: [pipeline.submit(batch).result() for batch in batches],
                "pipelined": lambda: list(pipeline.map(batches)),
            }.items():
                began_s, outputs = time.perf_counter(), serve()
                elapsed_s = time.perf_counter() - began_s
                apart = max((a - b).abs().max() for a, b in zip(outputs, expected, strict=True))
                print(f"{name}: {len(batches) / elapsed_s:.0f} batches/s, {apart:.0e} apart")
    dist.destroy_process_group()
