"""ResNet-50 in two stages on three processes: a master, and two workers that only serve.

All three on this machine::

    python examples/rpc_resnet50.py --local

On three machines, one line each; the address is the master's::

    python examples/rpc_resnet50.py --master-addr 10.0.0.1 --world-size 3 --rank 0
    python examples/rpc_resnet50.py --master-addr 10.0.0.1 --world-size 3 --rank 1
    python examples/rpc_resnet50.py --master-addr 10.0.0.1 --world-size 3 --rank 2

The master profiles and plans the model, and prints the time of a step for each number of
micro-batches. More workers make more stages.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.functional import cross_entropy

import stagewright
from stagewright.core.models.families import ResNetConfig, ResNetSpec
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.models.families import build_model
from stagewright.runtime.rpc import RpcPipeline, controller, serve

NUM_SPLITS = (1, 2, 4, 8)


def main() -> None:
    given = parse()
    if given.local:
        run_locally(given)
    elif given.rank == 0:
        run_master(given)
    else:
        serve(f"worker{given.rank}", given.rank, given.world_size, address(given))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", action="store_true", help="start all processes here")
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--rank", type=int, default=0, help="0 is the master")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="a multiple of 8")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def address(given: argparse.Namespace) -> str:
    return f"{given.master_addr}:{given.master_port}"


def run_locally(given: argparse.Namespace) -> None:
    """The workers are processes of this machine, and end with the master."""
    options = [word for word in sys.argv[1:] if word != "--local"]
    workers = [
        subprocess.Popen([sys.executable, __file__, *options, "--rank", str(rank)])
        for rank in range(1, given.world_size)
    ]
    try:
        run_master(given)
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    for worker in workers:
        worker.wait()


def run_master(given: argparse.Namespace) -> None:
    spec = ResNetSpec(family="resnet", config=ResNetConfig(depth=50))
    plan = make_plan(given, spec)
    print(plan)
    workers = [f"worker{rank}" for rank in range(1, given.world_size)]
    with controller(given.world_size, address(given)):
        for num_split in NUM_SPLITS:
            # Each worker builds the model itself, from this function and one seed.
            factory = functools.partial(build_model, spec)
            with RpcPipeline(
                factory, plan, workers=workers, num_split=num_split, seed=0
            ) as pipeline:
                step_s, loss = train(pipeline, given)
            print(f"num_split {num_split}: {step_s:.3f} s a step, loss {loss:.4f}", flush=True)


def make_plan(given: argparse.Namespace, spec: ResNetSpec) -> stagewright.Plan:
    """Two stages of about the same time, for micro-batches of an eighth of the batch."""
    num_microbatches = max(NUM_SPLITS)
    sample = torch.randn(given.batch_size // num_microbatches, 3, *[given.image_size] * 2)
    profile = stagewright.profile(build_model(spec), sample, options=ProfilingOptions(budget_s=5))
    num_stages = given.world_size - 1
    options = stagewright.PlanOptions(
        num_microbatches=num_microbatches, num_stages=num_stages, schedule="gpipe"
    )
    return stagewright.plan(profile, f"{num_stages}xcpu", options)


def train(pipeline: RpcPipeline, given: argparse.Namespace) -> tuple[float, float]:
    """Median time of a step after the first, and the last loss."""
    from torch.distributed.optim import DistributedOptimizer

    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=0.01)
    durations_s = []
    for step in range(given.steps + 1):
        torch.manual_seed(step)
        batch = torch.randn(given.batch_size, 3, given.image_size, given.image_size)
        target = torch.randint(0, 1000, (given.batch_size,))
        begin = time.perf_counter()
        loss = pipeline.train_step(batch, target=target, loss_fn=cross_entropy, optimizer=optimizer)
        durations_s.append(time.perf_counter() - begin)
    return statistics.median(durations_s[1:]), float(loss)


if __name__ == "__main__":
    main()
