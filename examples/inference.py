"""Serve a stream of requests with a planned model, in one process or under torchrun.

From the folder that holds ``examples/``::

    stagewright profile examples.inference:build_model --sample examples.inference:make_batch
    python examples/inference.py profile.json
    torchrun --nproc-per-node 2 examples/inference.py profile.json
"""

import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import stagewright
from stagewright import DistributedInferencePipeline, InferencePipeline

REQUESTS = 40


def build_model() -> torch.nn.Module:
    """The model the profile was made for, the same on every rank; load its weights here."""
    torch.manual_seed(0)
    width, layers = 256, []
    for _ in range(8):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def make_batch(size: int = 4) -> torch.Tensor:
    """A request of so many samples."""
    return torch.randn(size, 256)


def requests() -> Iterator[torch.Tensor]:
    """A stream, which might come from a socket and never end."""
    for number in range(REQUESTS):
        yield make_batch(1 + number % 4)


def serve(pipeline: InferencePipeline | DistributedInferencePipeline) -> None:
    """Answer all requests, in order, and say how many a second."""
    began_s = time.perf_counter()
    samples = sum(len(output) for output in pipeline.map(requests()))
    elapsed_s = time.perf_counter() - began_s
    print(f"{REQUESTS} requests of {samples} samples: {REQUESTS / elapsed_s:.0f} requests/s")


def main() -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    profile = stagewright.for_inference(stagewright.Profile.read(sys.argv[1]))
    options = stagewright.PlanOptions(objective="throughput", schedule="gpipe")
    plan = stagewright.plan(profile, f"{max(processes, 2)}xcpu", options)
    if processes == 1:
        with InferencePipeline(build_model(), plan) as pipeline:
            serve(pipeline)
        return
    stagewright.init_process_group(timeout_s=60)
    with DistributedInferencePipeline(build_model(), plan) as distributed:
        if distributed.rank == 0:
            serve(distributed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
