"""One rank of a small pipeline; one kills itself, hangs in a step, or never makes its pipeline."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from stagewright.core.errors import StagewrightError
from stagewright.core.plan import Plan
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.process_group import init_process_group
from tests.torch_models import Case, make_batch, make_case, make_plan

FATAL_FORWARD = 6
"""In the second step, after two of its four micro-batches."""


def main() -> None:
    what, victim, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    init_process_group(backend="gloo", timeout_s=timeout_s)
    case = make_case("mlp")
    plan = make_plan(case, int(os.environ["WORLD_SIZE"]))
    try:
        train(case, plan, what, victim, timeout_s)
    except StagewrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(7)


def train(case: Case, plan: Plan, what: str, victim: int, timeout_s: float) -> None:
    if what == "absent" and os.environ["RANK"] == str(victim):
        time.sleep(4 * timeout_s)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan)
    calls = 0

    def before_forward(*_: object) -> None:
        nonlocal calls
        calls += 1
        if pipeline.rank == victim and calls == FATAL_FORWARD:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4 * timeout_s)

    pipeline.module.register_forward_pre_hook(before_forward)
    for _ in range(3):
        pipeline.step(*batch, target=target)


if __name__ == "__main__":
    main()
