"""A passive worker: ``python -m tests.runtime.rpc_worker NAME RANK WORLD_SIZE ADDRESS``."""

from __future__ import annotations

import sys

import torch

from stagewright.core.errors import RankFailed
from stagewright.runtime.rpc import serve


def main() -> None:
    torch.set_num_threads(1)
    name, rank, world_size, address = sys.argv[1:]
    try:
        serve(name, int(rank), int(world_size), address, timeout_s=60)
    except RankFailed as error:
        sys.stderr.write(f"RankFailed: {error}\n")
        sys.exit(7)


if __name__ == "__main__":
    main()
