"""Start training processes on this machine and collect what they report."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ...core.errors import InvalidInput, RankFailed
from ...core.plan.plan import Plan
from ...core.plan.timeline import Timeline
from ...runtime.supported_plans import check_runnable
from ...schedules.plan_schedule import schedule_of
from .child_process import owned_process
from .rank_error import Account

WORKER = "stagewright.cli.support.train_worker"


@dataclass(frozen=True)
class TrainingResult:
    """Losses and times of each step.

    Attributes:
        losses: Mean loss of each step's batch.
        step_times_s: Forward, backward and gradient synchronisation of each step.
        timeline: Of one more step, where it was asked for.
    """

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    timeline: Timeline | None = None

    @property
    def step_time_s(self) -> float:
        """The median step, the first apart: it takes its memory from the system."""
        return median(self.step_times_s[1:] or self.step_times_s)


def train(
    plan: Plan,
    *,
    steps: int,
    whole: bool = False,
    seed: int = 0,
    timeout_s: float = 120.0,
    records: bool = False,
) -> TrainingResult:
    """Train a plan's model on made-up data: a process a device, or the whole model in one.

    Args:
        plan: Must name a model family.
        steps: Training steps.
        whole: Train the unsplit model instead.
        seed: Of the weights and the data; equal seeds make the two comparable.
        timeout_s: How long a rank waits for another.
        records: Take one more step, and record it.

    Raises:
        InvalidInput: The plan names no family.
        PlanMismatch: The plan uses what processes do not run, or is for another model.
        RankFailed: A process died; the message names its rank.
        MemoryError: A process had too little.
        RuntimeError: A process raised what it should not; the message names its rank.
    """
    check_trainable(plan)
    with tempfile.TemporaryDirectory(prefix="stagewright-") as folder:
        results = Path(folder)
        path = results / "plan.json"
        plan.write(path)
        ranks = 0 if whole else len(schedule_of(plan).ranks)
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            if ranks
            else []
        )
        options = [f"--steps={steps}", f"--seed={seed}", f"--timeout={timeout_s}"]
        command = [
            sys.executable, *launcher, "-m", WORKER, str(path), folder, *options,
            *(["--whole"] if whole else []), *(["--record"] if records else []),
        ]  # fmt: skip
        code, talk = _run(command)
        if code:
            raise _failure(results, code, talk)
        found = json.loads((results / "result.json").read_text(encoding="utf-8"))
        timeline = Timeline.read(results / "timeline.json") if records and not whole else None
    return TrainingResult(tuple(found["losses"]), tuple(found["step_times_s"]), timeline)


def check_trainable(plan: Plan) -> None:
    """Refuse plans that processes do not run, or whose model only the user's code can build.

    Raises:
        InvalidInput: The plan names no family.
        PlanMismatch: The plan uses what processes do not run.
    """
    check_runnable(plan)
    if plan.spec is None:
        raise InvalidInput(
            "this plan was not made from a model family, so the model cannot be built here; "
            "run it from a script of yours, see examples/train.py"
        )


def _run(command: list[str]) -> tuple[int, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with owned_process(command, environment) as process:
        assert process.stderr is not None
        talk = process.stderr.read()
    return process.returncode, talk


def _failure(results: Path, code: int, talk: str) -> Exception:
    """The error of the rank that had one of its own, what all say of a lost one, or last words."""
    accounts = [
        Account.model_validate_json(path.read_bytes())
        for path in sorted(results.glob("error.*.json"))
    ]
    for account in accounts:
        if account.error != RankFailed.__name__:
            return account.as_error()
    if accounts:
        lines = "\n  ".join(f"rank {account.rank}: {account.message}" for account in accounts)
        return RankFailed(f"training stopped:\n  {lines}")
    last = "\n  ".join(talk.strip().splitlines()[-15:])
    return RankFailed(f"training stopped with exit code {code}:\n  {last}")
