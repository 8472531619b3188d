"""Measurement of links between devices, for ``stagewright profile --links``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import InvalidInput, RankFailed
from ...core.text_table import format_table
from ...core.units import count, format_bytes, format_time
from .next_steps import command_line
from .output import check_writable, emit, say, say_next, write_file
from .progress import progress_bar

if TYPE_CHECKING:
    from ...profiler.links.rank_group import RankGroup
    from ...profiler.links.records import LevelFit, LinkOptions, LinkReport


DEFAULT_OUTPUT = Path("cluster.json")
MAX_DEFAULT_CPU_RANKS = 4
"""Default number of CPU ranks at most: enough for every communication pattern measured."""


def profile_links(
    *,
    ranks: int | None,
    device: str | None,
    budget_s: float | None,
    timeout_s: float,
    output: Path,
    as_json: bool,
    give_up: Callable[[RankFailed], None],
) -> None:
    """Measure the links and write the cluster; under ``torchrun`` as one of its ranks.

    ``give_up`` ends a rank under torchrun that is stuck in a call that never returns.
    """
    from ...profiler.links.records import LinkOptions

    if device not in (None, "cpu", "cuda"):
        raise InvalidInput(
            f"--links measures all devices of a kind: --device takes cpu or cuda, not {device}"
        )
    options = LinkOptions(device=device, timeout_s=timeout_s)
    if budget_s is not None:
        options = LinkOptions(device=device, timeout_s=timeout_s, budget_s=budget_s)
    if is_launched():
        if ranks is not None:
            raise InvalidInput("--ranks cannot be used under torchrun, which starts the ranks")
        _measure_as_rank(options, output, give_up, as_json=as_json)
        return
    check_writable(output)
    _finish(_measure_here(ranks, options, quiet=as_json), output, as_json=as_json)


def is_launched() -> bool:
    """Return True if a launcher such as torchrun started this process as one of its ranks."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def _measure_here(ranks: int | None, options: LinkOptions, *, quiet: bool) -> LinkReport:
    from dataclasses import replace

    from ...profiler.links.launch_local import measure_links_here

    device, count = options.device, ranks
    if device is None:
        device = "cuda" if ranks is None and _cuda_devices() else "cpu"
    if device == "cuda":
        count = count or _cuda_devices()
        if count < 2:
            raise InvalidInput(
                f"measuring links requires at least two devices; this machine has "
                f"{_cuda_devices()} CUDA devices. Measure between CPU ranks "
                "(--device cpu --ranks 2), or between machines with torchrun"
            )
    count = count or max(2, min(os.cpu_count() or 1, MAX_DEFAULT_CPU_RANKS))
    say(f"measuring links between {count} {device} ranks on this machine", quiet=quiet)
    with progress_bar(quiet=quiet) as progress:
        return measure_links_here(count, replace(options, device=device), progress)


def _cuda_devices() -> int:
    from ...profiler.links.rank_group import cuda_devices

    return cuda_devices()


def _measure_as_rank(
    options: LinkOptions, output: Path, give_up: Callable[[RankFailed], None], *, as_json: bool
) -> None:
    """Take part as one rank; rank 0 writes the cluster, and all ranks fail if it cannot."""
    from ...profiler.links.rank_main import join
    from ...profiler.links.session import LinkSession

    is_first = os.environ["RANK"] == "0"
    with join(options, lambda message: give_up(RankFailed(message))) as group:
        # Agreed on before and after: a rank that raised alone would leave the others waiting in
        # the next collective until their timeout.
        _agree(group, _problem_of(lambda: check_writable(output)) if is_first else "")
        with progress_bar(quiet=as_json or not is_first) as progress:
            report = LinkSession(group, progress).report()
        write = partial(_finish, report, output, as_json=as_json)
        _agree(group, _problem_of(write) if is_first else "")


def _agree(group: RankGroup, problem: str) -> None:
    """Raise `InvalidInput` on every rank if rank 0 reports a problem."""
    if problem := group.broadcast(problem, "to write the cluster"):
        raise InvalidInput(problem)


def _problem_of(write: Callable[[], None]) -> str:
    try:
        write()
    except InvalidInput as error:
        return str(error)
    return ""


def _finish(report: LinkReport, output: Path, *, as_json: bool) -> None:
    write_file(output, report.cluster.to_json(indent=2) + "\n")
    emit(report.model_dump_json(indent=2) if as_json else links_table(report))
    say(f"wrote {output}", quiet=as_json)
    follow = command_line("plan", "profile.json", "--devices", output, "-o", "plan.json")
    say_next(follow, quiet=as_json)


HEADINGS = (
    "link", "joins", "latency", "bandwidth", "fit error",
    "all-reduce", "fit error", "concurrent",
)  # fmt: skip


def links_table(report: LinkReport) -> str:
    """Format a report as a table with one row per level of links.

    A fit error is the median of abs(predicted - measured) / measured; for all-reduce over
    messages of at least 1 MiB.
    """
    devices = report.cluster.devices
    kinds = ", ".join(sorted({device.kind for device in devices}))
    lines = [f"{count(len(devices), 'rank')} on {kinds}, backend {report.backend}"]
    if report.levels:
        columns = list(zip(HEADINGS, *map(_row, report.levels), strict=True))
        # With two ranks no pairs compete, and the last column would be empty.
        filled = [column for column in columns if any(column[1:])]
        lines += ["", format_table(list(zip(*filled, strict=True)))]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _row(fit: LevelFit) -> tuple[str, ...]:
    level, slowdown = fit.level, fit.measured.slowdown
    reduce_bandwidth = level.all_reduce_bandwidth_bytes_per_s
    concurrent = "" if slowdown is None else f"x {slowdown:.1f}"
    return (
        level.name,
        str(level.group_size),
        format_time(level.latency_s),
        f"{format_bytes(level.bandwidth_bytes_per_s)}/s",
        f"{fit.message_error:.1%}",
        f"{format_bytes(reduce_bandwidth)}/s" if reduce_bandwidth else "same",
        "" if fit.all_reduce_error is None else f"{fit.all_reduce_error:.1%}",
        f"{concurrent}, shared" if level.shared else concurrent,
    )
