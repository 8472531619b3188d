"""Inject faults into one rank of a pipeline at random steps and check how every rank ends.

Ranks of a `DistributedPipeline` train until one of them is killed, stopped or hangs, raises, exits,
is given another batch, plan or model than the others, or computes NaN. Every rank that is left has
to end with an error that names the rank and the cause, within the group's timeout and five seconds.
Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a killed rank makes pages of traces

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # for the example, which is no part of the package

from benchmarks.killed_ranks import (  # noqa: E402
    fork_ranks,
    is_alive,
    made_up_profile,
    read_account,
)
from benchmarks.tables import write_between_marks  # noqa: E402
from examples.elastic import WIDTH, batch_of, build_model, make_optimizer  # noqa: E402
from stagewright.core.cluster.cluster import Cluster  # noqa: E402
from stagewright.core.plan.plan import Plan, PlanOptions  # noqa: E402
from stagewright.planner.plan import plan as make_plan  # noqa: E402
from stagewright.profiler.links.launch_local import free_port  # noqa: E402
from stagewright.runtime.distributed import DistributedPipeline  # noqa: E402

RANKS = 4
GRACE_S = 5.0
"""Allowed beyond the group's timeout."""

MANNERS = "FAULTS_AS_ON_NCCL"

FAULTS = {
    "kill": "stopped answering",
    "stop": "stopped answering",
    "exit": "stopped answering|raised SystemExit",
    "hang": "was at",
    "exception": "the injected error",
    "wrong batch": "given different",
    "different plan": "disagree on",
    "different model": "disagree on the model",
    "NaN": "NaN",
}
"""The cause that errors have to name, by fault; one of several separated by ``|``."""

ENDS_ITSELF = ("kill", "stop", "exit", "hang")
"""Faults after which the faulty rank raises no error."""

SHAPES = (
    PlanOptions(num_microbatches=8, num_stages=4),
    PlanOptions(num_microbatches=8, num_stages=4, schedule="gpipe"),
    PlanOptions(num_microbatches=8, num_stages=4, schedule="zero_bubble"),
    PlanOptions(num_microbatches=8, num_stages=2, max_replicas=2),
)


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, before which step, under which plan."""

    kind: str
    victim: int
    step: int
    plan: Plan
    other_plan: Plan
    variant: int


@dataclass(frozen=True)
class Result:
    """End of the ranks after a fault.

    Attributes:
        slowest_s: Seconds from the fault to the end of the last rank.
        said: What one of the other ranks said.
        violations: Promises that did not hold.
    """

    fault: Fault
    slowest_s: float
    said: str
    violations: tuple[str, ...]


def draw_faults(times: int, seed: int) -> list[Fault]:
    """Draw faults of all kinds equally often, in random order."""
    draws, profile = random.Random(seed), made_up_profile()
    cluster = Cluster.uniform(RANKS, kind="cpu")
    plans = [make_plan(profile, cluster, options) for options in SHAPES]
    fewer = SHAPES[0].model_copy(update={"num_microbatches": 4})
    others = [make_plan(profile, cluster, fewer), *plans[1:3]]
    kinds = [list(FAULTS)[number % len(FAULTS)] for number in range(times)]
    draws.shuffle(kinds)
    found = []
    for kind in kinds:
        plan = draws.choice(plans)
        other = draws.choice([each for each in others if each != plan])
        found.append(
            Fault(
                kind,
                draws.randrange(RANKS),
                draws.randrange(2, 20),
                plan,
                other,
                draws.randrange(2),
            )
        )
    return found


def inject(fault: Fault, folder: Path, timeout_s: float) -> Result:
    """Train with a fault and return how the ranks ended."""
    parent, port = os.getpid(), free_port()
    folder.mkdir()
    ranks = fork_ranks(
        RANKS, folder, lambda rank: _train(rank, parent, port, fault, folder, timeout_s)
    )
    try:
        ends = _await_ends(ranks, fault, folder, timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks[0], signal.SIGKILL)
        for process in ranks:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
    began = _moment(folder)
    accounts = {rank: read_account(folder, rank) for rank in _survivors(fault)}
    violations = [
        violation
        for rank, account in accounts.items()
        for violation in _violations(fault, rank, account, ends.get(rank), began, timeout_s)
    ]
    if is_alive(ranks[0]):
        violations.append("a process is left")
    slowest_s = max((end - began for end in ends.values()), default=0.0)
    others = [account for rank, account in accounts.items() if rank != fault.victim]
    return Result(fault, slowest_s, others[0].strip(), tuple(violations))


def _survivors(fault: Fault) -> list[int]:
    return [r for r in range(RANKS) if r != fault.victim or fault.kind not in ENDS_ITSELF]


def _violations(
    fault: Fault, rank: int, account: str, end: float | None, began: float, timeout_s: float
) -> list[str]:
    found = []
    if end is None or end - began > timeout_s + GRACE_S:
        found.append(f"rank {rank} did not end in time")
    if f"rank {fault.victim}" not in account:
        found.append(f"rank {rank} does not name rank {fault.victim}: {account or 'nothing'}")
    if not any(cause in account for cause in FAULTS[fault.kind].split("|")):
        found.append(f"rank {rank} does not name the cause: {account or 'nothing'}")
    return found


def _await_ends(
    ranks: Sequence[int], fault: Fault, folder: Path, timeout_s: float
) -> dict[int, float]:
    """Return when each surviving rank ended, as `time.monotonic` has it."""
    ends: dict[int, float] = {}
    survivors = _survivors(fault)
    # Twice the time allowed, so that it is known how late a rank is that ends too late.
    deadline = time.monotonic() + 60 + 2 * (timeout_s + GRACE_S)
    while time.monotonic() < deadline and not all(rank in ends for rank in survivors):
        began = _moment(folder)
        if began and time.monotonic() > began + 2 * (timeout_s + GRACE_S):
            break
        for rank in survivors:
            if rank not in ends and os.waitpid(ranks[rank], os.WNOHANG)[0]:
                ends[rank] = time.monotonic()
        time.sleep(0.02)
    return ends


def _moment(folder: Path) -> float:
    path = folder / "fault"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return float(text or 0)


def _train(rank: int, parent: int, port: int, fault: Fault, folder: Path, timeout_s: float) -> None:
    """Train as one rank until the fault ends it, or the parent is gone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    with _manners(folder):
        _train_until(rank, parent, fault, folder, timeout_s)


def _manners(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Run as on NCCL if ``--as-on-nccl`` was given."""
    if MANNERS not in os.environ:
        return contextlib.nullcontext()
    from tests.nccl.process_group import emulated

    return emulated(folder)


def _train_until(rank: int, parent: int, fault: Fault, folder: Path, timeout_s: float) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout_s)
    )
    is_victim = rank == fault.victim
    model, plan = build_model(), fault.plan

    def note_the_moment() -> None:
        partial = folder / "fault.partial"
        partial.write_text(str(time.monotonic()), encoding="utf-8")
        partial.replace(folder / "fault")

    if is_victim and fault.kind.startswith("different"):
        if fault.kind == "different plan":
            plan = fault.other_plan
        elif fault.variant:
            model[1] = nn.GELU()
        else:
            model[-1] = nn.Linear(WIDTH, 11)
        note_the_moment()
    with DistributedPipeline(model, plan, loss_fn=cross_entropy) as pipeline:
        optimizer = make_optimizer(pipeline.module)
        size, step = plan.inputs[0].shape[0] * plan.num_microbatches, 0
        while os.getppid() == parent:
            batch, target = batch_of(step, size)
            if is_victim and step == fault.step:
                if fault.kind == "wrong batch":
                    batch, target = batch_of(step + 1, size)
                elif fault.variant:
                    _fail(fault.kind, pipeline, note_the_moment)
                else:
                    _fail_inside(fault.kind, pipeline, note_the_moment)
                note_the_moment()
            pipeline.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def _fail_inside(
    kind: str, pipeline: DistributedPipeline, note_the_moment: Callable[[], None]
) -> None:
    """Arrange for the fault to happen in the next step's first forward."""

    def before_forward(*_: object) -> None:
        _fail(kind, pipeline, note_the_moment)

    if kind != "NaN":
        pipeline.module.register_forward_pre_hook(before_forward)
    else:
        _fail(kind, pipeline, note_the_moment)


def _fail(kind: str, pipeline: DistributedPipeline, note_the_moment: Callable[[], None]) -> None:
    note_the_moment()
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(10_000)
    elif kind == "exit":
        sys.exit(3)
    elif kind == "exception":
        raise RuntimeError("the injected error")
    elif kind == "NaN":
        for parameter in pipeline.module.parameters():
            parameter.data.view(-1)[0] = float("nan")


def make_table(results: Sequence[Result], timeout_s: float, seed: int) -> str:
    """Return the table for the docs."""
    lines = [
        f"{len(results)} faults on {RANKS} ranks, timeout {timeout_s:g} s, seed {seed}:",
        "",
        "| fault | times | all ranks left name rank and cause | slowest end |",
        "|---|---|---|---|",
    ]
    for kind in FAULTS:
        rows = [result for result in results if result.fault.kind == kind]
        good = sum(not result.violations for result in rows)
        slowest_s = max((result.slowest_s for result in rows), default=0.0)
        lines.append(f"| {kind} | {len(rows)} | {good} | {slowest_s:.1f} s |")
    return "\n".join(lines)


def main() -> int:
    """Inject the faults, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    parser.add_argument(
        "--as-on-nccl", action="store_true", help="lost ranks raise nothing by themselves"
    )
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.as_on_nccl:
        os.environ[MANNERS] = "1"
    results = []
    with tempfile.TemporaryDirectory() as name:
        for number, fault in enumerate(draw_faults(given.times, given.seed)):
            result = inject(fault, Path(name, str(number)), given.timeout)
            results.append(result)
            print(
                f"{number:3} {fault.kind:15} rank {fault.victim} step {fault.step:2} over in "
                f"{result.slowest_s:5.2f} s  {result.said[:160]}",
                *(f"\n    VIOLATION: {each}" for each in result.violations),
                file=sys.stderr,
                flush=True,
            )
    print(table := make_table(results, given.timeout, given.seed))
    if given.write:
        write_between_marks(given.write, "faults.py", table)
    return 1 if any(result.violations for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
