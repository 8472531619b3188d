"""Measure how the processes of one machine talk to each other, and write it down as a cluster.

Starts a process a device; on several machines ``torchrun`` starts them, and each
calls `rank.join`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Timer

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput, RankFailed, StagewrightError
from ...core.progress import Progress
from .records import LinkOptions, LinkReport

STARTING_S = 60.0
"""For processes to import torch, on a busy machine."""


def measure_local_links(num_ranks: int, *, kind: str = "cpu", budget_s: float = 6.0) -> Cluster:
    """Measure the loopback link between CPU ranks; return them as a cluster."""
    if num_ranks < 2:
        return Cluster.uniform(num_ranks, kind=kind)
    options = LinkOptions(device="cpu", budget_s=budget_s)
    (fit,) = measure_links_here(num_ranks, options).levels
    return Cluster.uniform(
        num_ranks,
        kind=kind,
        latency_s=fit.level.latency_s,
        bandwidth_bytes_per_s=fit.level.bandwidth_bytes_per_s,
        all_reduce_bandwidth_bytes_per_s=fit.level.all_reduce_bandwidth_bytes_per_s,
    )


def measure_links_here(
    num_ranks: int, options: LinkOptions, progress: Progress | None = None
) -> LinkReport:
    """Start ranks on this machine, each a process, and measure the links between them.

    At least two ranks; on CUDA at most one per device. A `RankFailed` says which waited for which.
    """
    if num_ranks < 2:
        raise InvalidInput(f"links join at least two ranks, not {num_ranks}")
    with tempfile.TemporaryDirectory(prefix="stagewright-") as folder:
        with _ranks(num_ranks, options, Path(folder)) as processes:
            found = _follow(processes[0], progress)
            codes = [] if found is None else [process.wait() for process in processes]
        if found is None or any(codes):
            raise _failure(Path(folder), num_ranks)
    return found


def free_port() -> int:
    """Return a TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _ranks(
    num_ranks: int, options: LinkOptions, folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks; none outlives the block, and their output goes to files."""
    port = free_port()
    command = [
        sys.executable, "-m", "stagewright.profiler.links.rank_main", json.dumps(asdict(options)),
    ]  # fmt: skip
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "GROUP_RANK": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
            with _account(folder, rank).open("w", encoding="utf-8") as account:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=account,
                        text=True,
                    )
                )
        longest_s = STARTING_S + options.budget_s + 2 * options.timeout_s
        backstop = Timer(longest_s, _kill, args=(processes,))
        backstop.start()
        try:
            yield processes
        finally:
            backstop.cancel()
    finally:
        _kill(processes)
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _follow(first: subprocess.Popen[str], progress: Progress | None) -> LinkReport | None:
    assert first.stdout is not None
    for line in first.stdout:
        said = json.loads(line)
        if "report" in said:
            return LinkReport.model_validate(said["report"])
        if progress is not None:
            progress(said["done"], said["total"], said["what"])
    return None


def _account(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def _failure(folder: Path, num_ranks: int) -> StagewrightError:
    """Combine the ranks' own reports of how they ended into one error."""
    found: list[StagewrightError] = []
    last = ""
    for rank in range(num_ranks):
        for line in _account(folder, rank).read_text(encoding="utf-8").splitlines():
            try:
                found.append(StagewrightError.from_record(json.loads(line)))
            except (ValueError, TypeError):
                last = f"rank {rank}: {line.strip()}" if line.strip() else last
    # A rank with an error other than RankFailed is the cause; the others merely lost contact.
    for error in found:
        if not isinstance(error, RankFailed):
            return error
    told = list(dict.fromkeys(map(str, found)))
    lines = "\n  ".join(told or [last or "a rank ended without a word"])
    return RankFailed(f"measuring links stopped:\n  {lines}")
