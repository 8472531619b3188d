"""Ranks without a launcher: forked, trained, and one of them killed; what the others say then."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.functional import cross_entropy

from examples.elastic import batch_of, build_model, make_batch, make_optimizer
from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import StagewrightError
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.plan import plan as make_plan
from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.distributed import DistributedPipeline

SAID_WHO = 7
"""Exit code of a rank that raised an error of ours."""

SAVE_EVERY = 5
"""Steps; so often that many a kill meets a save."""


def made_up_profile() -> Profile:
    """Return the example's model with times that make every cut worth while."""
    captured = trace(build_model(), make_batch(), check=False)
    graph = captured.graph
    forward, backward = Timing(median_s=1e-3), Timing(median_s=2e-3)
    return Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=forward, backward=backward) for layer in graph.layers
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
    )


def checkpoint_loads(folder: Path) -> int:
    """Load the last checkpoint into the unsplit model; return its step."""
    model = build_model()
    return load_checkpoint(folder, model, make_optimizer(model)).step


def kill_one(
    number: int, num_ranks: int, folder: Path, profile: Profile, timeout_s: float
) -> dict[str, Any]:
    """Train until a random moment, kill one rank, and see how the others end.

    Returns:
        The row of the table; ``violations`` lists what should not have been.
    """
    options = PlanOptions(num_microbatches=8, num_stages=num_ranks)
    plan = make_plan(profile, Cluster.uniform(num_ranks, kind="cpu"), options)
    victim, parent, port = number % num_ranks, os.getpid(), free_port()
    folder.mkdir()
    ranks = fork_ranks(
        num_ranks, folder, lambda rank: _train(rank, parent, port, plan, folder, timeout_s)
    )
    try:
        _wait_until(lambda: len(list(folder.glob("trained.*"))) == num_ranks, 2 * timeout_s)
        delay_s = random.uniform(0, 2)
        time.sleep(delay_s)
        os.kill(ranks[victim], signal.SIGKILL)
        start = time.monotonic()
        codes = _reaped(ranks, 2 * timeout_s)
        ended_s = time.monotonic() - start
        left = is_alive(ranks[0])
    finally:
        if is_alive(ranks[0]):
            os.killpg(ranks[0], signal.SIGKILL)
    accounts = {rank: read_account(folder, rank) for rank in range(num_ranks) if rank != victim}
    violations = ["a process is left"] if left else []
    for rank, account in accounts.items():
        if codes.get(rank) != SAID_WHO:
            violations.append(f"rank {rank} ended with {codes.get(rank)}")
        if f"RankFailed: rank {victim} (" not in account or f"rank {rank} was at " not in account:
            violations.append(f"rank {rank} said: {account or 'nothing'}")
    return {
        "way": "ranks alone", "victim": victim, "after_s": round(delay_s, 3),
        "ended_s": round(ended_s, 2), "checkpoint": loads_or_violates(folder / "run", violations),
        "said": next(iter(accounts.values())), "violations": violations,
    }  # fmt: skip


def _train(rank: int, parent: int, port: int, plan: Plan, folder: Path, timeout_s: float) -> None:
    """One rank, until it is killed, another is, or the parent is gone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(
        "gloo", rank=rank, world_size=plan.num_stages, timeout=timedelta(seconds=timeout_s)
    )
    pipeline = DistributedPipeline(build_model(), plan, loss_fn=cross_entropy)
    optimizer = make_optimizer(pipeline.module)
    size, step = plan.inputs[0].shape[0] * plan.num_microbatches, 0
    while os.getppid() == parent:
        batch, target = batch_of(step, size)
        pipeline.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0:
            save_checkpoint(folder / "run", pipeline, optimizer, step=step, keep=2)
            (folder / f"trained.{rank}").touch()


def fork_ranks(num_ranks: int, folder: Path, train: Callable[[int], None]) -> list[int]:
    """Ranks in a process group of their own, led by the first."""
    ranks: list[int] = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            _end_with(rank, folder, train)
        ranks.append(child)
        os.setpgid(child, ranks[0])
    return ranks


def _end_with(rank: int, folder: Path, train: Callable[[int], None]) -> None:
    """Run a child to its end, whatever happens: it must not go on as its parent."""
    code = 1
    try:
        train(rank)
    except BaseException as error:  # noqa: BLE001
        code = SAID_WHO if isinstance(error, StagewrightError) else 1
        words = "".join(traceback.format_exception_only(error))  # with the notes
        _said(folder, rank).write_text(words, encoding="utf-8")
    os._exit(code)


def _said(folder: Path, rank: int) -> Path:
    return folder / f"said.{rank}"


def read_account(folder: Path, rank: int) -> str:
    path = _said(folder, rank)
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _reaped(ranks: list[int], timeout_s: float) -> dict[int, int]:
    """Exit codes of the ranks that ended in time."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            if rank not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return codes


def is_alive(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def loads_or_violates(folder: Path, violations: list[str]) -> int | None:
    try:
        return checkpoint_loads(folder)
    except StagewrightError as error:
        violations.append(f"the checkpoint does not load: {error}")
        return None


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks did not start training within {timeout_s:g} s")
        time.sleep(0.02)
