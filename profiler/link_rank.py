"""One rank of a link measurement; rank 0 prints the figures as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from .allocator import keep_freed_memory
from .links import fit_line

MESSAGE_BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 16 * 2**20)
ALL_REDUCE_BYTES = 32 * 2**20
REPEATS = 9


def main() -> None:
    """Round trips between ranks 0 and 1, then an all-reduce over all."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    points = []
    if rank < 2:
        for message_bytes in MESSAGE_BYTES:
            message = torch.ones(message_bytes // 4)
            round_trip_s = _median_time(partial(_round_trip, message, rank))
            points.append((message_bytes, round_trip_s / 2))
    dist.barrier()
    buffer = torch.ones(ALL_REDUCE_BYTES // 4)
    reduce_s = _median_time(partial(_all_reduce, buffer))
    if rank == 0:
        latency_s, bandwidth = fit_line(points)
        moved = 2 * (size - 1) / size * ALL_REDUCE_BYTES
        sys.stdout.write(
            json.dumps(
                {
                    "latency_s": latency_s,
                    "bandwidth_bytes_per_s": bandwidth,
                    "all_reduce_bandwidth_bytes_per_s": moved / reduce_s,
                }
            )
            + "\n"
        )
    dist.destroy_process_group()


def _round_trip(buffer: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(buffer, 1)
        dist.recv(buffer, 1)
    else:
        dist.recv(buffer, 0)
        dist.send(buffer, 0)


def _all_reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)


def _median_time(action: Callable[[], None]) -> float:
    times_s = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - start)
    return median(times_s[2:])


if __name__ == "__main__":
    main()
