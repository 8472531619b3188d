"""Small pipelines of which one rank kills itself, hangs in a step, or never makes its pipeline.

What rank r of a scenario writes to stderr is in the folder's ``SCENARIO-VICTIM-r.txt``; the exit
codes of all that ended by themselves are printed, a line of JSON to a scenario.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time

import torch

from stagewright.core.errors import StagewrightError
from stagewright.core.plan.plan import Plan
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import exit_codes, fork_ranks
from tests.torch_models import Case, make_batch, make_case, make_plan

RANKS = 3
FATAL_FORWARD = 6
"""In the second step, after two of its four micro-batches."""
FOR_EVER_S = 600


def main() -> None:
    folder, scenarios = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    case = make_case("mlp")
    plan = make_plan(case, RANKS)
    started = []  # all at once: they wait more than they work
    for what, victim, timeout_s in scenarios:
        run = functools.partial(doomed, case, plan, what, victim, timeout_s)
        words = f"{folder}/{what}-{victim}-{{}}.txt"
        started.append((what, victim, fork_ranks(RANKS, run, words)))
    for what, victim, ranks in started:
        codes = exit_codes(ranks, hung=() if what == "kill" else (victim,))
        print(json.dumps({"what": what, "victim": victim, "codes": codes}), flush=True)


def doomed(case: Case, plan: Plan, what: str, victim: int, timeout_s: float) -> None:
    init_process_group(backend="gloo", timeout_s=timeout_s)
    try:
        train(case, plan, what, victim)
    except StagewrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(7)


def train(case: Case, plan: Plan, what: str, victim: int) -> None:
    if what == "absent" and os.environ["RANK"] == str(victim):
        time.sleep(FOR_EVER_S)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan)
    calls = 0

    def before_forward(*_: object) -> None:
        nonlocal calls
        calls += 1
        if pipeline.rank == victim and calls == FATAL_FORWARD:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(FOR_EVER_S)

    pipeline.module.register_forward_pre_hook(before_forward)
    for _ in range(3):
        pipeline.step(*batch, target=target)


if __name__ == "__main__":
    main()
