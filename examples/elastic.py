"""Train on as many ranks as there are: a lost rank costs the steps since the last checkpoint.

From the folder that holds ``examples/``::

    stagewright profile examples.elastic:build_model --sample examples.elastic:make_batch
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py profile.json --checkpoints run

On several machines, any number of which may be lost, see ``docs/guides/elastic.md``.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import stagewright
from stagewright import (
    Cluster,
    DistributedPipeline,
    Plan,
    PlanOptions,
    Profile,
    StagewrightError,
    latest_step,
    load_checkpoint,
    save_checkpoint,
)
from stagewright.runtime.elastic import (
    group_for,
    join,
    plan_for_world,
    ranks_of,
    release_spares,
    wait_as_spare,
)
from stagewright.runtime.ranks.process_groups import end_process

WIDTH, CLASSES = 64, 10


def build_model() -> torch.nn.Module:
    """The model that was profiled, the same on every rank."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES))


def make_batch(size: int = 4) -> Tensor:
    """One micro-batch, to be profiled with."""
    return torch.randn(size, WIDTH)


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The data of a step follows from its number alone, so that a resumed run sees the same."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (size,), generator=generator)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Of the whole model or of one rank's part of it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_plan(profile: Profile, devices: int, given: argparse.Namespace) -> Plan:
    """The best plan for the devices that are left, for the same batch as before."""
    memory_bytes = None if given.memory_gib is None else int(given.memory_gib * 2**30)
    cluster = Cluster.uniform(devices, kind="cpu", memory_bytes=memory_bytes)
    stages = None if given.stages is None else min(given.stages, devices)
    options = PlanOptions(num_microbatches=given.microbatches, num_stages=stages)
    return stagewright.plan(profile, cluster, options)


def train(plan: Plan, group: dist.ProcessGroup, given: argparse.Namespace) -> None:
    """From the last checkpoint to the last step."""
    pipeline = DistributedPipeline(build_model(), plan, loss_fn=cross_entropy, group=group)
    optimizer = make_optimizer(pipeline.module)
    first = 0
    if latest_step(given.checkpoints) is not None:
        first = load_checkpoint(given.checkpoints, pipeline, optimizer).step
    say(f"rank {pipeline.rank} of {ranks_of(plan)}, process {os.getpid()}: from step {first}")
    size = plan.inputs[0].shape[0] * plan.num_microbatches
    for step in range(first, given.steps):
        batch, target = batch_of(step, size)
        loss = pipeline.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            say(f"step {step}: loss {loss:.9g}")
        if (step + 1) % given.save_every == 0 or step + 1 == given.steps:
            save_checkpoint(given.checkpoints, pipeline, optimizer, step=step + 1, keep=2)
    pipeline.barrier()
    pipeline.close()


def main() -> None:
    given = arguments()
    profile = Profile.read(given.profile)
    join(timeout_s=given.timeout)
    plan = plan_for_world(lambda devices: make_plan(profile, devices, given))
    group = group_for(plan)
    if group is None:
        say(f"rank {dist.get_rank()} is spare: the plan uses {ranks_of(plan)} devices")
        wait_as_spare()
    else:
        train(plan, group, given)
        release_spares(plan)
    dist.destroy_process_group()


def say(text: str) -> None:
    """A whole line at once: the ranks write into one stream."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", type=Path)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stages", type=int, help="as many, or one a device if there are fewer")
    parser.add_argument("--memory-gib", type=float, help="of each device")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except StagewrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        end_process(1)  # a transport that lost its peer may wait for it at a normal exit
