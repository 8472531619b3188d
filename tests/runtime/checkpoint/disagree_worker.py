"""Two ranks, one of which cannot go along: what each of them is told, as JSON lines."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from stagewright.runtime.checkpoint import save as saving
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint


def model(rank: int, width: int = 4) -> nn.Module:
    """A layer that both hold and one of its own."""
    return nn.ModuleDict({"common": nn.Linear(4, width), f"of {rank}": nn.Linear(2, 2)})


def cases(folder: Path, rank: int) -> dict[str, Callable[[], Any]]:
    one = rank == 1
    part = model(rank)

    def sgd(**options: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(part.parameters(), **({"lr": 0.1} | options))

    def adam() -> torch.optim.Optimizer:
        return torch.optim.Adam(part.parameters())

    less = nn.ModuleDict({"common": nn.Linear(4, 4)})

    def save(**options: Any) -> object:
        return save_checkpoint(folder, part, **({"step": 1} | options))

    def bug() -> object:
        return save(extra=Broken(a=1) if one else None)

    def full_disk() -> object:
        write = saving.FileSystemWriter.write_data

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        saving.FileSystemWriter.write_data = fail if one else write
        try:
            return save(step=2)
        finally:
            saving.FileSystemWriter.write_data = write

    def while_another_saves() -> object:
        with open(folder / ".lock", "a") as file:
            if rank == 0:
                fcntl.flock(file, fcntl.LOCK_EX)
            return save(step=2)

    def draw() -> list[float]:
        torch.manual_seed(rank)
        save(step=3, random_state=True)
        drawn = torch.rand(2).tolist()
        torch.manual_seed(7)
        load_checkpoint(folder, part, random_state=True)
        assert torch.rand(2).tolist() == drawn
        return drawn

    def sharded() -> list[float]:
        """Trained in shards, saved, and loaded into new shards and into whole parameters."""
        losses = []
        trained, optimizer = make_sharded(0)
        train(trained, optimizer)
        save_checkpoint(folder, trained, optimizer, step=4)
        losses.append(train(trained, optimizer))
        for resumed, later in (make_sharded(1), make_whole(2)):
            load_checkpoint(folder, resumed, later)
            losses.append(train(resumed, later))
        return losses

    return {
        "well": lambda: save(optimizer=sgd()).name,
        "other step": lambda: save(step=1 + rank),
        "no json": lambda: save(extra={"f": print} if one else None),
        "other shape": lambda: save_checkpoint(folder, model(rank, width=4 + rank), step=2),
        "other rate": lambda: save(optimizer=sgd(lr=0.1 + rank)),
        "other optimizer": lambda: save(optimizer=adam() if one else sgd()),
        "other folder": lambda: save_checkpoint(folder / str(rank), part, step=2),
        "bug": bug,
        "full disk": full_disk,
        "another saves": while_another_saves,
        "load well": lambda: load_checkpoint(folder, model(rank), step=1).step,
        "load more": lambda: load_checkpoint(
            folder, nn.ModuleDict({**part, "more": nn.Linear(1, 1)}) if one else part, step=1
        ),
        "load less": lambda: load_checkpoint(folder, less, step=1),
        "load optimizer": lambda: load_checkpoint(
            folder, part, adam() if one else sgd(), step=1
        ),
        "random": draw,
        "sharded": sharded,
    }  # fmt: skip


def make_whole(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return made, torch.optim.AdamW(made.parameters(), lr=0.1)


def make_sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    made, _ = make_whole(seed)
    fully_shard(made, mesh=dist.init_device_mesh("cpu", (2,)))
    return made, torch.optim.AdamW(made.parameters(), lr=0.1)


def train(made: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Two steps, on the same data on every rank; the loss of the second."""
    for _ in range(2):
        optimizer.zero_grad()
        loss = made(torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


class Broken(dict[str, object]):
    def items(self) -> Any:
        return 1 / 0


def run(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}.group", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    for name, action in cases(folder, rank).items():
        entry: dict[str, Any] = {"case": name, "rank": rank}
        try:
            entry["done"] = action()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            entry |= {"error": type(error).__name__, "said": str(error)}
        dist.barrier()
        entry["left"] = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        sys.stdout.write(json.dumps(entry, default=str) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    child = os.fork()
    run(Path(sys.argv[1]), rank=int(child == 0))
    if child:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
