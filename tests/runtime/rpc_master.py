"""The master of an RPC session of three: ``python -m tests.runtime.rpc_master SCENARIO ADDRESS``.

Prints what it found as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy

from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.errors import StagewrightError
from stagewright.core.plan.plan import Plan
from stagewright.runtime.rpc import RpcPipeline, controller
from tests.runtime.rpc_models import (
    Dies,
    DiesLater,
    Meets,
    Raises,
    build_unevenly,
    far_tied_model,
    tied_model,
)
from tests.torch_models import Case, make_plan

Found = dict[str, Any]
WORKERS = ["worker1", "worker2"]
BATCH = 16


def plan_for(model: nn.Module, sample: Tensor, num_stages: int, **options: Any) -> Plan:
    case = Case("rpc", None, model, (sample,), cross_entropy)
    return make_plan(case, num_stages, **options)


def tied_plan(model: nn.Module, num_stages: int) -> Plan:
    sample = torch.zeros(4, dtype=torch.long)
    return plan_for(model, sample, num_stages, num_microbatches=BATCH // 4)


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, 16, (BATCH,)), torch.randint(0, 16, (BATCH,))


def whole_step(model: nn.Module, batch: Tensor, target: Tensor, num_split: int) -> float:
    """The unsplit model over the same micro-batches; gradients stay in ``.grad``."""
    total = 0.0
    for piece, wanted in zip(batch.chunk(num_split), target.chunk(num_split), strict=True):
        loss = cross_entropy(model(piece), wanted) / num_split
        loss.backward()
        total += float(loss.detach())
    return total


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative_difference(found[name], wanted[name]) for name in wanted)


def equality() -> Iterator[Found]:
    """Steps of SGD and Adam against the unsplit model, stages on two workers or three of them."""
    for num_split in (1, 2, 4, 8):
        yield compare(tied_model, WORKERS, num_split, send=True)
    yield compare(tied_model, ["worker1", "worker2", "worker1"], 4)
    yield compare(tied_model, ["worker2", "worker2"], 2)


def compare(
    build: Callable[[], nn.Module], workers: list[str], num_split: int, *, send: bool = False
) -> Found:
    whole = build()
    plan = tied_plan(whole, len(workers))
    model = build() if send else build
    batch, target = data()
    with RpcPipeline(model, plan, workers=workers, num_split=num_split) as pipeline:
        expected = whole_step(whole, batch, target, num_split)
        with dist_autograd.context() as context:
            loss = pipeline.forward_backward(context, batch, target=target, loss_fn=cross_entropy)
            gradients = pipeline.gradients(context)
        wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        found: Found = {
            "of": f"{build.__name__} on {workers}, {num_split} micro-batches",
            "loss": abs(float(loss) - expected) / expected,
            "gradient_names": sorted(gradients) == sorted(wanted),
            "gradient": worst(gradients, wanted),
            "state": train_both(pipeline, whole),
            "names": list(pipeline.state_dict()) == list(whole.state_dict()),
        }
        pipeline.eval()
        whole.eval()
        with torch.no_grad():
            found["evaluation"] = relative_difference(pipeline(batch), whole(batch))
        loaded = build().state_dict()
        pipeline.load_state_dict(loaded)
        found["loaded"] = worst(pipeline.state_dict(), loaded)
    return found


def train_both(pipeline: RpcPipeline, whole: nn.Module) -> float:
    """Some steps of two optimizers on either; the largest difference in what they end with."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    for kind, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adam, {"lr": 0.01})):
        theirs = DistributedOptimizer(kind, pipeline.parameter_rrefs(), **options)
        ours = kind(trained, **options)
        for seed in (2, 3):
            batch, target = data(seed)
            pipeline.train_step(batch, target=target, loss_fn=cross_entropy, optimizer=theirs)
            ours.zero_grad()
            whole_step(whole, batch, target, pipeline.num_split)
            ours.step()
    return worst(pipeline.state_dict(), whole.state_dict())


def overlap() -> Iterator[Found]:
    """Stage 0 does not finish its second micro-batch before stage 1 has begun its first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = nn.Sequential(Meets(path, "early", {1: "late0"}), Meets(path, "late", {}))
        plan = plan_for(model, torch.zeros(2, 4), 2, num_microbatches=3)
        with RpcPipeline(model, plan, workers=WORKERS) as pipeline:
            yield {"output": float(pipeline(torch.ones(6, 4)).sum())}


def errors() -> Iterator[Found]:
    """What raises on a worker says so here, and the pipeline goes on working."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Raises(), nn.Tanh())
    plan = plan_for(model, torch.zeros(2, 4), 2, num_microbatches=4, balance=[1, 2])
    with RpcPipeline(model, plan, workers=WORKERS) as pipeline:
        pipeline.load_state_dict({"0.weight": torch.eye(4)})
        batch = torch.ones(8, 4)
        batch[4:6] = -1
        yield {"raised": caught(lambda: pipeline(batch))}
        yield {"again": list(pipeline(torch.ones(8, 4)).shape)}
        yield {"backward": caught(lambda: step(pipeline, 1000 * torch.ones(8, 4)))}
        yield {"later": caught(lambda: step(pipeline, torch.ones(8, 4)))}
        yield {"short": caught(lambda: pipeline(torch.ones(0, 4)))}
        yield {"state": caught(lambda: pipeline.load_state_dict({}))}
        wrong = {"0.weight": torch.eye(3)}
        yield {"shape": caught(lambda: pipeline.load_state_dict(wrong))}
    yield {"closed": caught(lambda: pipeline(torch.ones(8, 4)))}
    yield {"gone": caught(pipeline.state_dict)}
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    yield {"other": caught(lambda: RpcPipeline(other, plan, workers=WORKERS))}
    local = nn.Sequential(nn.Linear(4, 4))
    local.forward = lambda x: x
    yield {"unsent": caught(lambda: RpcPipeline(local, plan, workers=WORKERS))}
    yield {"unknown": caught(lambda: RpcPipeline(only_here, plan, workers=WORKERS))}
    built = build_unevenly
    yield {"uneven": caught(lambda: RpcPipeline(built, uneven_plan(), workers=WORKERS))}
    far = tied_plan(far_tied_model(), 2)
    yield {"tied": caught(lambda: RpcPipeline(far_tied_model, far, workers=WORKERS))}
    yield {"few": caught(lambda: RpcPipeline(model, plan, workers=["worker1"]))}
    yield {"split": caught(lambda: RpcPipeline(model, plan, workers=WORKERS, num_split=3))}
    yield {"nobody": caught(lambda: RpcPipeline(model, plan, workers=["worker1", "w2"]))}


def uneven_plan() -> Plan:
    return plan_for(build_unevenly(), torch.ones(2, 4), 2, num_microbatches=2)


def only_here() -> nn.Module:
    """Workers know this file by another name, or not at all."""
    return nn.Identity()


def death() -> Iterator[Found]:
    """The second worker ends in the middle of a forward."""
    yield from deadly(Dies())


def late_death() -> Iterator[Found]:
    """The second worker ends in the middle of a backward."""
    yield from deadly(DiesLater())


def deadly(last: nn.Module) -> Iterator[Found]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), last)
    plan = plan_for(model, torch.zeros(2, 4), 2, num_microbatches=2)
    with RpcPipeline(model, plan, workers=WORKERS) as pipeline:
        pipeline.load_state_dict({"0.weight": torch.eye(4)})
        for sign in (1, -1):
            step(pipeline, sign * torch.ones(4, 4))
            yield {"survived": sign}


def step(pipeline: RpcPipeline, batch: Tensor) -> None:
    target = torch.zeros(len(batch), dtype=torch.long)
    with dist_autograd.context() as context:
        pipeline.forward_backward(context, batch, target=target, loss_fn=cross_entropy)


def vanishing() -> Iterator[Found]:
    """The master itself ends."""
    yield {}
    os._exit(9)


def caught(work: Callable[[], Any]) -> str:
    try:
        work()
    except StagewrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main() -> None:
    torch.set_num_threads(1)
    scenarios = (equality, overlap, errors, death, late_death, vanishing)
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    try:
        with controller(3, sys.argv[2], timeout_s=60):
            for name in sys.argv[1].split(","):
                for found in by_name[name]():
                    print(json.dumps({"scenario": name, **found}), flush=True)
    except StagewrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(7)


if __name__ == "__main__":
    main()
