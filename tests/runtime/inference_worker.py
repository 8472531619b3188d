"""Three ranks that serve a stream of requests; say what happened as lines of JSON.

Ranks are forked from one process, so that torch is imported once and not twelve times.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from examples import inference
from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput, PlanMismatch, RankFailed
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.inference.distributed import DistributedInferencePipeline
from stagewright.runtime.inference.transport import MicrobatchTransport, WireMessage
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.nccl.host_tensor import on_host
from tests.runtime.forked import exit_codes, fork_ranks, print_line
from tests.torch_models import Case, traced_profile

RANKS = 3
WIDTH = 6
FATAL_FORWARD = 6


class Crossing(nn.Module):
    """A late input, whole numbers over a cut, a long skip, two outputs, and one that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.experts = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        first = self.layers[0](x)
        expert = first.argmax(-1)
        y = self.layers[2](self.layers[1](first))
        late = self.layers[4](self.layers[3](y) * scale + self.experts(expert))
        return {"late": late + first, "early": y, "none": None}


def crossing(seed: int) -> nn.Module:
    """Differs from rank to rank by its seed, as replicas may."""
    torch.manual_seed(seed)
    return Crossing().double()


def chain() -> nn.Module:
    """Takes batches of any size."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


class Counts(nn.Module):
    """Adds the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def counting() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)], Counts())


@functools.cache
def profile_of(build: Callable[[], nn.Module]) -> Profile:
    """Traced in the parent, before the ranks are forked."""
    sample: Any = (doubles(4, WIDTH), doubles(4, WIDTH))
    sample = sample if build is Crossing else sample[0].float()
    model = build().double() if build is Crossing else build()
    found = traced_profile(Case("", None, model, sample, None))  # type: ignore[arg-type]
    # Old profiles do not say that a layer keeps state.
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"stateful": ""})})
        for entry in found.layers
    )
    return found.model_copy(update={"layers": layers})


def plan_of(build: Callable[[], nn.Module], replicas: list[int]) -> Plan:
    profile = profile_of(build)
    base, extra = divmod(len(profile.layers), len(replicas))
    return plan_from_balance(
        profile,
        Cluster.uniform(sum(replicas)),
        PlanOptions(num_microbatches=4),
        [base + (index < extra) for index in range(len(replicas))],
        replicas=replicas if max(replicas) > 1 else (),
    )


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def equality(replicas: list[int]) -> None:
    plan = plan_of(Crossing, replicas)
    torch.manual_seed(5)
    batches = [(doubles(count, WIDTH), doubles(count, WIDTH)) for count in (4, 8, 2, 4, 7) * 4]
    model = crossing(0 if dist.get_rank() in first_of_each(replicas) else 9)
    with DistributedInferencePipeline(model, plan, pad=True) as pipeline:
        if pipeline.rank == 0:
            whole = crossing(0).eval()
            worst = 0.0
            for batch, output in zip(batches, pipeline.map(on_host(batches)), strict=True):
                with torch.no_grad():
                    expected = whole(*batch)
                for name in ("late", "early"):
                    found = output[name].as_subclass(torch.Tensor)
                    worst = max(worst, relative_difference(found, expected[name]))
                assert output["none"] is None
            say("equality", replicas=replicas, worst=worst)


receive = MicrobatchTransport.receive


def receive_on_host(self: MicrobatchTransport, sender: int) -> WireMessage:
    """Messages arrive in a host's memory: a stage has to move them to its device."""
    message = receive(self, sender)
    if message.microbatch is None:
        return message
    microbatch = replace(message.microbatch, values=on_host(message.microbatch.values))
    return replace(message, microbatch=microbatch)


def first_of_each(replicas: list[int]) -> set[int]:
    """The lowest rank of each stage, whose weights the others take."""
    return {sum(replicas[:index]) for index in range(len(replicas))}


def errors() -> None:
    """What one request raises, on a stage of another process, is its own."""
    model = chain()
    plan = plan_of(chain, [1, 1, 1])
    hooked = dist.new_group()
    with DistributedInferencePipeline(model, plan, max_in_flight=3) as pipeline:
        if pipeline.rank == 1:

            def refuse(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
                if inputs[0].shape[0] == 2:
                    raise ArithmeticError("two samples")

            pipeline.module.register_forward_pre_hook(refuse)
        dist.barrier(hooked)  # or rank 0 could send before rank 1 has the hook
        if pipeline.rank == 1:
            try:
                pipeline.submit(torch.randn(4, WIDTH))
            except InvalidInput as error:
                say("other rank", error=str(error))
        if pipeline.rank == 0:
            batch = torch.randn(4, WIDTH)
            futures = [pipeline.submit(batch[:count]) for count in (4, 2, 1, 2, 3)]
            cancelled = pipeline.submit(batch)
            was_cancelled = cancelled.cancel()
            wait(futures)
            raised = [future.exception() for future in futures]
            say(
                "errors",
                kinds=[type(error).__name__ for error in raised],
                notes=getattr(raised[1], "__notes__", []),
                right=all(
                    torch.allclose(future.result(), model(batch[: len(future.result())]))
                    for future in futures
                    if future.exception() is None
                ),
                cancelled=was_cancelled == cancelled.cancelled(),
            )


def state() -> None:
    """A layer that counts its calls is refused in replicas, by every rank."""
    try:
        DistributedInferencePipeline(counting(), plan_of(counting, [3])).close()
    except PlanMismatch as error:
        say("state", error=str(error))


def idle() -> None:
    """No request for longer than the group's timeout is no failure."""
    model = chain()
    plan = plan_of(chain, [1, 1, 1])
    group = dist.new_group(timeout=timedelta(seconds=5))
    with DistributedInferencePipeline(model, plan, group=group) as pipeline:
        if pipeline.rank == 0:
            batch = torch.randn(4, WIDTH)
            pipeline.submit(batch).result()
            time.sleep(6)
            say("idle", right=torch.allclose(pipeline.submit(batch).result(), model(batch)))


def doomed(what: str, victim: int) -> None:
    """In the middle of a stream one rank dies, or stops working."""
    model = chain()
    plan = plan_of(chain, [1, 1, 1])
    hooked = dist.new_group()
    calls = 0

    def fatal(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == FATAL_FORWARD:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    try:
        with DistributedInferencePipeline(model, plan) as pipeline:
            if pipeline.rank == victim:
                pipeline.module.register_forward_pre_hook(fatal)
            dist.barrier(hooked)
            if pipeline.rank == 0:
                for _ in pipeline.map(torch.randn(4, WIDTH) for _ in range(1000)):
                    pass
    except RankFailed as error:
        say("failed", of=what, victim=victim, error=str(error))
        os._exit(7)


def say(what: str, **fields: Any) -> None:
    print_line({"what": what, "rank": dist.get_rank(), **fields})


def write_profile(path: Any) -> None:
    """What ``stagewright profile`` writes of the example's model, with made-up times."""
    case = Case("", None, inference.build_model(), inference.make_batch(), None)  # type: ignore[arg-type]
    traced_profile(case).write(path)


def serve() -> None:
    before = {thread.name for thread in threading.enumerate()} | {"tqdm_monitor"}
    idle()
    with mock.patch.object(MicrobatchTransport, "receive", receive_on_host):
        for replicas in ([1, 2], [2, 1]):
            equality(replicas)
    errors()
    state()
    say("threads", names=sorted({t.name for t in threading.enumerate()} - before))
    dist.barrier()
    dist.destroy_process_group()


def one_rank(what: str, victim: int, timeout_s: float) -> None:
    if what == "example":
        inference.main()
        return
    init_process_group(backend="gloo", timeout_s=timeout_s)
    doomed(what, victim) if what != "serve" else serve()


def main() -> None:
    torch.set_num_threads(1)
    profile_of(Crossing), profile_of(chain), profile_of(counting)
    scenarios = json.loads(sys.argv[1])
    sys.argv[1] = f"{tempfile.mkdtemp()}/profile.json"
    write_profile(sys.argv[1])
    started = []  # all at once: they wait more than they work
    for what, victim, timeout_s in scenarios:
        run = functools.partial(one_rank, what, victim, timeout_s)
        started.append((what, victim, fork_ranks(RANKS, run)))
    for what, victim, ranks in started:
        codes = exit_codes(ranks, hung=(victim,) if what == "hang" else ())
        print(
            json.dumps({"what": "ended", "of": what, "victim": victim, "codes": codes}), flush=True
        )


if __name__ == "__main__":
    main()
