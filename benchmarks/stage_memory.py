"""Compare the memory that a plan predicts with what its stages take in real training processes.

Every stage is a process of its own, connected by gloo, and trains a step by its plan's recipe of
precision. Every call of torch's allocator in it is recorded, and added to what model, gradients and
optimizer hold when it begins. Exits 1 if a stage is off by more than `LIMIT`.

    benchmarks/stage_memory.py --write docs/evidence/stage-memory.md
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.allocations import Allocations  # noqa: E402
from benchmarks.memory_models import Subject, llama, next_token  # noqa: E402
from benchmarks.tables import write_between_marks  # noqa: E402
from stagewright import Training, build  # noqa: E402
from stagewright.core.cluster.cluster import Cluster  # noqa: E402
from stagewright.core.models.families import GPT2Config, GPT2Spec  # noqa: E402
from stagewright.core.models.training_memory import RECIPES, Recipe  # noqa: E402
from stagewright.core.plan.plan import Plan, PlanOptions, Stage  # noqa: E402
from stagewright.core.plan.schedule import TrainingSchedule  # noqa: E402
from stagewright.core.profile.profile import Profile  # noqa: E402
from stagewright.core.requests.requests import ProfilingOptions  # noqa: E402
from stagewright.planner.price_split import plan_from_balance  # noqa: E402
from stagewright.profiler.measure.profile import profile  # noqa: E402
from stagewright.profiler.models.families import build_model  # noqa: E402

LIMIT = 0.05
"""Largest relative error of a stage's peak."""

MOST_TOKENS = 64


def gpt2() -> Subject:
    """Six blocks with dropout everywhere and a tied head."""
    config = GPT2Config(n_layer=6, n_embd=96, n_head=4, vocab_size=512, n_positions=64)
    tokens = torch.randint(0, 512, (1, MOST_TOKENS))
    model = build_model(GPT2Spec(family="gpt2", config=config))
    return Subject(model, {"input_ids": tokens}, tokens, next_token)


MODELS = {"gpt2": gpt2, "llama": llama}
STAGES = 3
MICROBATCHES = (4, 32, 128, 512)
SCHEDULES: tuple[TrainingSchedule, ...] = ("gpipe", "1f1b")
RECOMPUTED: dict[Literal["never", "layers"], tuple[int, ...]] = {
    "never": MICROBATCHES,
    "layers": (4, 32),
}
"""Numbers of micro-batches, by what is recomputed."""

LENGTHS = {"never": 16, "layers": MOST_TOKENS}
"""Tokens of a sample: more where each checkpoint keeps random state beside them."""

RECIPES_MEASURED: tuple[Recipe, ...] = ("fp32", "bf16_mixed", "bf16_autocast")


@dataclass(frozen=True)
class StagePeak:
    """One stage's memory, predicted and measured; ``update_bytes`` is of the optimizer's step.

    Predicted is what the plan says, and `random_state_bytes`.
    """

    model: str
    recipe: str
    recompute: str
    schedule: str
    microbatches: int
    stage: int
    in_flight: int
    predicted_bytes: int
    measured_bytes: int
    update_bytes: int
    receives_bytes: int
    predicted_receives_bytes: int

    @property
    def error(self) -> float:
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def subject_of(name: str, length: int) -> Subject:
    """Return a model with a micro-batch of one sample of so many tokens."""
    torch.manual_seed(0)
    found = MODELS[name]()
    tokens = found.target[:1, :length].contiguous()
    return Subject(found.model, {"input_ids": tokens}, tokens, found.loss_fn)


def profile_subject(name: str, recipe: Recipe, length: int) -> Profile:
    """Profile a model in a recipe's precision."""
    subject = subject_of(name, length)
    model = copy.deepcopy(subject.model).to(getattr(torch, RECIPES[recipe].weights))
    return profile(
        model,
        subject.sample,
        options=ProfilingOptions(budget_s=0.01, num_threads=1, precision=recipe),
        loss_fn=subject.loss_fn,
        target=subject.target,
    )


def make_plans(name: str, recipe: Recipe, folder: Path) -> list[Path]:
    """Profile a model in a recipe's precision, and plan it for every case."""
    paths = []
    profiles = {length: profile_subject(name, recipe, length) for length in set(LENGTHS.values())}
    for schedule, (recompute, counts) in product(SCHEDULES, RECOMPUTED.items()):
        measured = profiles[LENGTHS[recompute]]
        cuts = [0, *(b.after + 1 for b in measured.boundaries if b.legal), len(measured.layers)]
        edges = [
            min(cuts, key=lambda cut: abs(cut - part * len(measured.layers) / STAGES))
            for part in range(STAGES + 1)
        ]
        balance = [last - first for first, last in pairwise(edges)]
        for count in counts:
            options = PlanOptions(
                schedule=schedule, num_microbatches=count, optimizer="adam", recompute=recompute
            )
            plan = plan_from_balance(measured, Cluster.uniform(STAGES), options, balance)
            path = folder / f"{name}-{recipe}-{recompute}-{schedule}-{count}.json"
            path.write_text(plan.to_json(), encoding="utf-8")
            paths.append(path)
    return paths


def measure(paths: Sequence[Path], name: str, folder: Path) -> Iterator[StagePeak]:
    """Train by several plans of a model, one after another, in one process a stage."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(STAGES),
        "STORE": str(folder / f"{paths[0].stem}.store"),
    }  # fmt: skip
    command = [sys.executable, __file__, "--models", name, "--worker", *map(str, paths)]
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(STAGES)
    ]
    try:
        for _ in paths:
            for process in processes:
                assert process.stdout is not None
                yield StagePeak(**json.loads(process.stdout.readline()))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def train_all(paths: Sequence[Path], name: str) -> None:
    """Train by every plan as one of the ranks, and print what this stage took."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ["STORE"], size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=20),
    )
    torch.set_num_threads(1)
    for path in paths:
        print(json.dumps(asdict(train(path, name, rank))), flush=True)
    dist.destroy_process_group()


def train(path: Path, name: str, rank: int) -> StagePeak:
    """Take a step by a plan and measure it.

    Gradients are in place when it begins, as they are where several steps make one update.
    """
    plan = Plan.from_json(path.read_text(encoding="utf-8"))
    subject = subject_of(name, plan.inputs[0].shape[1])
    count = plan.num_microbatches
    batch = subject.target.repeat(count, 1)
    training = build(plan, subject.model, loss_fn=subject.loss_fn)
    with training:
        del subject
        optimizer = training.optimizer(torch.optim.Adam)
        put_gradients(training)
        optimizer.step()  # the optimizer makes its state
        put_gradients(training)
        held = held_bytes(training.module, optimizer)
        receives = Receives()
        with receives, Allocations() as during:
            training.step(input_ids=batch, target=batch)
        held_then = held_bytes(training.module, optimizer)
        with Allocations() as updating:
            training.update(optimizer)
    stage = plan.stages[rank]
    return StagePeak(
        model=name,
        recipe=str(plan.options.precision),
        recompute=str(plan.options.recompute),
        schedule=plan.schedule,
        microbatches=count,
        stage=rank,
        in_flight=stage.in_flight,
        predicted_bytes=stage.memory.total_bytes + random_state_bytes(stage),
        measured_bytes=held + during.peak_bytes,
        update_bytes=held_then + updating.peak_bytes,
        receives_bytes=receives.peak_bytes,
        predicted_receives_bytes=stage.memory.receive_buffers_bytes,
    )


def random_state_bytes(stage: Stage) -> int:
    """Return the bytes of the CPU generator's states that checkpoints keep.

    Plans leave them out: 16 bytes of a GPU's generator for each checkpoint and micro-batch in
    flight, but 5 kB of the CPU's.
    """
    return len(stage.checkpoints) * stage.in_flight * torch.get_rng_state().nbytes


def put_gradients(training: Training) -> None:
    """Give every weight a gradient of zeros, in the type that its gradients are summed in."""
    for parameter in training.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def held_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Sum the storages of weights, buffers, gradients and the optimizer's state, each once."""
    gc.collect()
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Receives:
    """Bytes of posted receives whose message no action has read, at most, while one computes.

    Watches ``torch.distributed.irecv`` and the end of `P2PChannels.receive`, and nothing of how
    either decides.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._open: dict[int, int] = {}

    def __enter__(self) -> Receives:
        from stagewright.runtime.engine import p2p

        self._irecv, self._receive = dist.irecv, p2p.P2PChannels.receive

        def irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            storage = tensor.untyped_storage()
            self._open[storage.data_ptr()] = storage.nbytes()
            return self._irecv(tensor, *args, **kwargs)

        def receive(channels: Any, *args: Any) -> list[Tensor]:
            found = self._receive(channels, *args)
            for tensor in found:
                del self._open[tensor.untyped_storage().data_ptr()]
            self.peak_bytes = max(self.peak_bytes, sum(self._open.values()))
            return found

        dist.irecv = irecv
        p2p.P2PChannels.receive = receive  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        from stagewright.runtime.engine import p2p

        dist.irecv = self._irecv
        p2p.P2PChannels.receive = self._receive  # type: ignore[method-assign]


def page(peaks: Iterable[StagePeak]) -> str:
    """Write the table of a document."""
    lines = [
        "| model | recipe | recompute | schedule | micro-batches | stage | in flight "
        "| predicted | measured | error | receives, predicted | posted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for peak in peaks:
        lines.append(
            f"| {peak.model} | {peak.recipe} | {peak.recompute} | {peak.schedule} "
            f"| {peak.microbatches} | {peak.stage + 1} of {STAGES} | {peak.in_flight} "
            f"| {_mib(peak.predicted_bytes)} | {_mib(peak.measured_bytes)} | {peak.error:+.1%} "
            f"| {peak.predicted_receives_bytes:,} | {peak.receives_bytes:,} |"
        )
    return "\n".join(lines) + "\n"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default=",".join(RECIPES_MEASURED))
    parser.add_argument("--microbatches", default=",".join(map(str, MICROBATCHES)))
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    parser.add_argument("--worker", type=Path, nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        train_all(given.worker, given.models)
        return 0
    wanted = set(given.microbatches.split(","))
    peaks: list[StagePeak] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models.split(","):
            for recipe in cast("list[Recipe]", given.recipes.split(",")):
                plans = make_plans(name, recipe, Path(folder))
                plans = [path for path in plans if path.stem.rpartition("-")[2] in wanted]
                for peak in measure(plans, name, Path(folder)):
                    peaks.append(peak)
                    shown = json.dumps({**asdict(peak), "error": round(peak.error, 4)})
                    print(shown if given.json else _line(peak), flush=True)
    worst = max(peaks, key=lambda peak: abs(peak.error))
    print(f"{len(peaks)} stages; the largest error is {worst.error:+.2%}", file=sys.stderr)
    if given.write:
        write_between_marks(given.write, "stage_memory.py", page(peaks))
    return 1 if abs(worst.error) > LIMIT else 0


def _line(peak: StagePeak) -> str:
    return (
        f"{peak.model:<6} {peak.recipe:<14} {peak.recompute:<6} {peak.schedule:<6} "
        f"{peak.microbatches:>4} stage {peak.stage}: {_mib(peak.predicted_bytes):>12} predicted, "
        f"{_mib(peak.measured_bytes):>12} measured, {peak.error:+.2%}; update "
        f"{_mib(peak.update_bytes)}; receives {peak.predicted_receives_bytes} predicted, "
        f"{peak.receives_bytes} posted"
    )


if __name__ == "__main__":
    sys.exit(main())
