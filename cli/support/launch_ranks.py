"""Training processes on this machine: starting them, their results and their errors."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ...core.errors import ForeignError, InvalidInput, OutOfMemory, RankFailed, StagewrightError
from ...core.plan.plan import Plan
from ...core.plan.timeline import Timeline
from ...core.units import count, format_bytes
from ...profiler.machine.memory import free_memory_bytes, is_out_of_memory
from ...runtime.supported_plans import check_runnable
from ...schedules.plan_schedule import count_ranks
from .child_process import owned_process
from .load_object import OwnModel

if TYPE_CHECKING:
    from ...runtime.verify import Verification

PROCESS_BYTES = 250 * 2**20
"""Memory of a process of a group without a model: 207 MiB of its own were measured on Linux."""


def write_error(results: Path, rank: int, error: Exception) -> None:
    """Write the error that ended a rank where the launcher looks for it, and to stderr."""
    own = ForeignError.of(error)
    if is_out_of_memory(error):
        own = OutOfMemory(f"ran out of memory: {error}")
    record = own.at(f"rank {rank}").to_record()
    path = results / f"error.{rank}.json"
    path.write_text(json.dumps(record.as_dict), encoding="utf-8")
    sys.stderr.write("\n".join((record.message, *record.notes, "")))


TRAIN_WORKER = "stagewright.cli.support.train_worker"
VERIFY_WORKER = "stagewright.cli.support.verify_worker"
_DOING = {TRAIN_WORKER: "training", VERIFY_WORKER: "verifying"}


@dataclass(frozen=True)
class TrainingResult:
    """Each step's mean loss and seconds, and the timeline of an additional step if requested."""

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    timeline: Timeline | None = None

    @property
    def step_time_s(self) -> float:
        """Median step time."""
        # Without the first step, which waits for the system to map the memory it allocates.
        return median(self.step_times_s[1:] or self.step_times_s)


def train(
    plan: Plan,
    *,
    steps: int,
    own: OwnModel | None = None,
    whole: bool = False,
    seed: int = 0,
    timeout_s: float = 120.0,
    records: bool = False,
) -> TrainingResult:
    """Train a plan's model, with one process per device or unsplit in one.

    A model of a family trains on synthetic data, one's own on samples of its function.

    With equal seeds, split and ``whole`` losses are comparable. Whatever ends a process is raised
    here with its rank, as `OutOfMemory` if memory ran out; a rank waits ``timeout_s`` for another.
    With ``records``, an additional step is recorded.

    Raises:
        PlanMismatch: Processes cannot run the plan, or it is for another model.
        RankFailed: A process died; the message names its rank.
    """
    check_trainable(plan, own)
    options = [f"--steps={steps}", f"--timeout={timeout_s}", *(["--record"] if records else [])]
    ranks = 0 if whole else count_ranks(plan)
    words = [f"--seed={seed}", *options, *(["--whole"] if whole else [])]
    with _run_ranks(TRAIN_WORKER, plan, own, ranks, words) as results:
        found = json.loads((results / "result.json").read_text(encoding="utf-8"))
        timeline = Timeline.read(results / "timeline.json") if records and not whole else None
    return TrainingResult(tuple(found["losses"]), tuple(found["step_times_s"]), timeline)


def verify_on_ranks(
    plan: Plan,
    *,
    own: OwnModel | None = None,
    seed: int = 0,
    is_single: bool = False,
    timeout_s: float = 120.0,
) -> Verification:
    """Verify a plan with one process per device; see `runtime.verify_distributed`.

    Raises:
        PlanMismatch: Processes cannot run the plan, or it is for another model.
        RankFailed: A process died; the message names its rank.
    """
    from ...runtime.verify import Verification

    check_trainable(plan, own)
    words = [f"--seed={seed}", f"--timeout={timeout_s}", *(["--single"] if is_single else [])]
    with _run_ranks(VERIFY_WORKER, plan, own, count_ranks(plan), words) as results:
        found = json.loads((results / "result.json").read_text(encoding="utf-8"))
    for name in ("missing", "unknown"):
        found[name] = tuple(found[name])
    return Verification(**found)


@contextmanager
def _run_ranks(
    worker: str, plan: Plan, own: OwnModel | None, ranks: int, words: list[str]
) -> Iterator[Path]:
    """Run a worker once on each rank, or by itself for none; the block reads its result files."""
    with tempfile.TemporaryDirectory(prefix="stagewright-") as folder:
        results = Path(folder)
        path = results / "plan.json"
        plan.write(path)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [
            sys.executable, *(launcher if ranks else []), "-m", worker, str(path), folder, *words,
            *(["--own", *own.words] if own is not None else []),
        ]  # fmt: skip
        code, stderr = _run(command)
        if code:
            raise _build_error(results, code, stderr, _DOING[worker])
        yield results


def check_trainable(plan: Plan, own: OwnModel | None = None) -> None:
    """Check that processes can run the plan and build its model."""
    check_runnable(plan)
    if plan.spec is None and own is None:
        raise InvalidInput("the plan's model is not from a model family; name the model")


def _run(command: list[str]) -> tuple[int, str]:
    # One thread per rank, as the profile was measured: more would compete for the same cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with owned_process(command, environment) as process:
        assert process.stderr is not None
        stderr = process.stderr.read()
    return process.returncode, stderr


def _build_error(
    results: Path, code: int, stderr: str, doing: str = "training"
) -> StagewrightError:
    found = [
        StagewrightError.from_record(json.loads(path.read_bytes()))
        for path in sorted(results.glob("error.*.json"))
    ]
    # A rank with an error other than RankFailed is the cause; the others merely lost contact.
    for error in found:
        if not isinstance(error, RankFailed):
            return error
    if found:
        lines = "\n  ".join(map(str, found))
        return RankFailed(f"{doing} stopped:\n  {lines}")
    last = "\n  ".join(stderr.strip().splitlines()[-15:])
    return RankFailed(f"{doing} stopped with exit code {code}:\n  {last}")


def check_memory(required_bytes: int, reason: str, remedy: str) -> None:
    """Raise `OutOfMemory` if so many bytes are not free; ``reason`` says what takes them."""
    available = free_memory_bytes()
    if available is not None and required_bytes > available:
        raise OutOfMemory(
            f"{reason}: about {format_bytes(required_bytes)}, and this machine has "
            f"{format_bytes(available)} free; {remedy}",
            required_bytes=required_bytes,
            available_bytes=available,
        )


def check_training_memory(plan: Plan) -> None:
    """Check that this machine can train a plan with one process per device.

    Each process builds the model, and has its stages' gradients and activations. This is less than
    they take where a plan's weights are narrower than the float32 they are built in.

    Raises:
        OutOfMemory: Memory is short; the message has both numbers.
    """
    ranks = count_ranks(plan)
    model_bytes = sum(stage.memory.weights_bytes for stage in plan.stages)
    own_bytes = sum(
        len(stage.devices) * (stage.memory.gradients_bytes + stage.memory.activations_bytes)
        for stage in plan.stages
    )
    check_memory(
        ranks * (PROCESS_BYTES + model_bytes) + own_bytes,
        f"training takes {count(ranks, 'process')} here, each with a copy of the "
        f"model's {format_bytes(model_bytes)}, and {format_bytes(own_bytes)} of gradients and "
        "activations",
        "run the plan where there is more, or plan fewer blocks",
    )
