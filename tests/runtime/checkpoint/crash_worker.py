"""Saves that are killed: at every single file operation in turn, or ranks at random moments.

Imports torch once; what dies are its forked children. Prints one JSON line a death.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright.core.errors import StagewrightError
from stagewright.runtime.checkpoint.load import latest_step, load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint

OPERATIONS = ("open", "os.", "shutil.", "fcntl.")
CASES: tuple[tuple[int, int | None], ...] = ((3, 1), (2, 2))
"""Step saved and how many are kept."""

EARLIER = (5, 2)
"""Steps saved before, with values 1 and 2: somebody went back, so the latest is not the highest."""

SLOTS = 2
"""Ranks of the random deaths."""


def model(value: float, rank: int | None = None) -> nn.Module:
    """Everything in it is the value; of several ranks, each has its own layer and one in common."""
    names = ["common", *(f"of {r}" for r in range(SLOTS) if rank in (None, r))]
    made = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def loaded(folder: Path) -> float:
    """The value that is loaded; every number has to be it."""
    made = model(-1)
    value = load_checkpoint(folder, made).extra["value"]
    assert isinstance(value, int | float)
    assert all(bool((p == value).all()) for p in made.parameters()), "a mixture"
    return value


def loaded_at_once(folder: Path) -> float:
    """What is loaded while a rank may still publish a step, and delete the one that is read."""
    while True:
        step = latest_step(folder)
        try:
            return loaded(folder)
        except FileNotFoundError:
            if latest_step(folder) == step:
                raise


def save(folder: Path, step: int, value: float, **options: Any) -> None:
    save_checkpoint(folder, model(value), step=step, extra={"value": value}, **options)


def in_child(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - a child must not go on as its parent
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(1)
    return child


def die_at(count: int, folder: Path) -> None:
    """Kill this process at its ``count``-th operation on a file of the folder.

    Where it waits for the disk, what it wrote last is cut in half, as a power failure might.
    """
    left = count

    def reached(event: str, path: object, cut: Callable[[], None] = lambda: None) -> None:
        nonlocal left
        if str(path).startswith(str(folder)):
            left -= 1
            if left < 0:
                cut()
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(OPERATIONS) and arguments:
            reached(event, os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")

    def fsync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.path.getsize(path)
        reached("fsync", path, lambda: os.path.isfile(path) and os.truncate(path, size // 2))
        original(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


def every_operation(root: Path, step: int, keep: int | None) -> None:
    """Save value 3 over a copy of the same folder, and die one operation later each time."""
    before = root / "before"
    for value, earlier in enumerate(EARLIER, start=1):
        save(before, earlier, value)
    for count in range(10_000):
        folder = root / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)

        def action(folder: Path = folder, count: int = count) -> None:
            die_at(count, folder)
            save(folder, step, 3, keep=keep)

        _, status = os.waitpid(in_child(action), 0)
        found = loaded(folder)
        save(folder, 9, 9, keep=keep)
        rest = sorted(path.name for path in folder.iterdir())
        killed = os.WIFSIGNALED(status)
        entry = {"killed": killed, "found": found, "rest": rest, "after": loaded(folder)}
        print(json.dumps({"step": step, "keep": keep} | entry))
        if not killed:
            assert os.WEXITSTATUS(status) == 0
            return


def random_deaths(root: Path, times: int) -> None:
    """Two ranks save one step after the other, until one is killed; then all start again."""
    random.seed(0)
    for number in range(times):
        first = (latest_step(root / "run") or 0) + 1

        def action(rank: int, number: int = number, first: int = first) -> None:
            rendezvous = f"file://{root}/group-{number}"
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=SLOTS,
                timeout=timedelta(seconds=20),
            )  # fmt: skip
            for step in range(first, first + 10_000):
                part, extra = model(step, rank), {"value": step}
                save_checkpoint(root / "run", part, step=step, extra=extra, keep=2)

        ranks = [in_child(lambda rank=rank: action(rank)) for rank in range(SLOTS)]
        while latest_step(root / "run") in (None, first - 1):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        victims = random.sample(ranks, random.randint(1, SLOTS))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
            time.sleep(random.choice([0, 0.02]))
        at_once = loaded_at_once(root / "run")  # while the others still notice
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps({"first": first, "at once": at_once, "found": loaded(root / "run"),
                          "codes": codes}))  # fmt: skip


def main() -> None:
    what, root = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if what == "random":
        random_deaths(root, int(sys.argv[3]))
    else:
        for case, (step, keep) in enumerate(CASES):
            every_operation(root / str(case), step, keep)


if __name__ == "__main__":
    try:
        main()
    except StagewrightError as error:
        sys.exit(f"{type(error).__name__}: {error}")
