"""What ``stagewright profile --links`` does: measure the links between devices, write a cluster."""

from __future__ import annotations

import os
import sys
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
MOST_LOCAL_CPU_RANKS = 4
"""Started without being told how many: enough for every pattern measured."""


def profile_links(
    *,
    ranks: int | None,
    device: str | None,
    budget_s: float | None,
    timeout_s: float,
    output: Path,
    as_json: bool,
) -> None:
    """Measure the links and write the cluster; under ``torchrun`` as one of its ranks.

    Args:
        ranks: CPU ranks to start here; `None` for one a device.
        device: ``cpu`` or ``cuda``; `None` for CUDA where there is any.
        budget_s: Seconds to measure, about.
        timeout_s: How long a rank waits for another.
        output: Where the cluster goes.
        as_json: Print the report with all times instead of a table.

    Raises:
        InvalidInput: Options that do not go together.
        RankFailed: A rank stopped answering; the message says which waited for which.
    """
    from ...profiler.links.records import LinkOptions

    if device not in (None, "cpu", "cuda"):
        raise InvalidInput(
            f"links are measured between all devices: --device cpu or cuda, not {device}"
        )
    options = LinkOptions(device=device, timeout_s=timeout_s)
    if budget_s is not None:
        options = LinkOptions(device=device, timeout_s=timeout_s, budget_s=budget_s)
    if launched():
        if ranks is not None:
            raise InvalidInput(
                "--ranks starts ranks on this machine; under torchrun they are there"
            )
        _as_rank(options, output, as_json=as_json)
        return
    check_writable(output)
    _finish(_here(ranks, options, quiet=as_json), output, as_json=as_json)


def launched() -> bool:
    """Whether this process is one of several ranks that a launcher started."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def _here(ranks: int | None, options: LinkOptions, *, quiet: bool) -> LinkReport:
    """Start a rank a device on this machine, and measure."""
    from dataclasses import replace

    from ...profiler.links.launch_local import measure_links_here

    device, count = options.device, ranks
    if device is None:
        device = "cuda" if ranks is None and _cuda_devices() else "cpu"
    if device == "cuda":
        count = count or _cuda_devices()
        if count < 2:
            raise InvalidInput(
                f"this machine has {_cuda_devices()} CUDA devices, and links join at least two; "
                "measure between CPU ranks (--device cpu --ranks 2), or between machines with "
                "torchrun"
            )
    count = count or max(2, min(os.cpu_count() or 1, MOST_LOCAL_CPU_RANKS))
    say(f"measuring links between {count} {device} ranks of this machine", quiet=quiet)
    with progress_bar(quiet=quiet) as progress:
        return measure_links_here(count, replace(options, device=device), progress)


def _cuda_devices() -> int:
    from ...profiler.links.rank_group import cuda_devices

    return cuda_devices()


def _as_rank(options: LinkOptions, output: Path, *, as_json: bool) -> None:
    """One rank's part; rank 0 writes, and no rank ends well unless it has."""
    from ...profiler.links.rank_main import join
    from ...profiler.links.session import LinkSession

    is_first = os.environ["RANK"] == "0"
    with join(options, lambda message: _give_up(message, as_json=as_json)) as group:
        _agree(group, _refusal(output) if is_first else "")
        with progress_bar(quiet=as_json or not is_first) as progress:
            report = LinkSession(group, progress).report()
        problem = ""
        if is_first:
            try:
                _finish(report, output, as_json=as_json)
            except InvalidInput as error:
                problem = str(error)
        _agree(group, problem)


def _agree(group: RankGroup, problem: str) -> None:
    """Every rank fails if rank 0 could not write.

    Raises:
        InvalidInput: It could not.
    """
    if problem := group.tell(problem, "to write the cluster"):
        raise InvalidInput(problem)


def _refusal(output: Path) -> str:
    """Why the file cannot be written, if it cannot."""
    try:
        check_writable(output)
    except InvalidInput as error:
        return str(error)
    return ""


def _finish(report: LinkReport, output: Path, *, as_json: bool) -> None:
    write_file(output, report.cluster.to_json(indent=2) + "\n")
    emit(report.model_dump_json(indent=2) if as_json else links_table(report))
    say(f"wrote {output}", quiet=as_json)
    follow = command_line("plan", "profile.json", "--devices", output, "-o", "plan.json")
    say_next(follow, quiet=as_json)


def _give_up(message: str, *, as_json: bool) -> None:
    """End a rank that waits in a call that does not return."""
    from ..exit_codes import exit_code, report

    error = RankFailed(message)
    report(error, as_json=as_json)
    sys.stderr.flush()
    os._exit(exit_code(error))


HEADINGS = (
    "link", "joins", "latency", "bandwidth", "fit error",
    "all-reduce", "fit error", "sent at once",
)  # fmt: skip


def links_table(report: LinkReport) -> str:
    """What ``stagewright profile --links`` prints.

    A fit error is the median of abs(predicted - measured) / measured; for all-reduces over those
    of 1 MiB and more.
    """
    kinds = sorted({device.kind for device in report.cluster.devices})
    lines = [
        f"{count(len(report.cluster.devices), 'rank')} on {', '.join(kinds)}, by {report.backend}"
    ]
    if report.levels:
        columns = list(zip(HEADINGS, *map(_row, report.levels), strict=True))
        told = [column for column in columns if any(column[1:])]  # two ranks are one pair alone
        lines += ["", format_table(list(zip(*told, strict=True)))]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _row(fit: LevelFit) -> tuple[str, ...]:
    level, slowdown = fit.level, fit.measured.slowdown
    reduce_bandwidth = level.all_reduce_bandwidth_bytes_per_s
    together = "" if slowdown is None else f"x {slowdown:.1f}"
    return (
        level.name,
        str(level.group_size),
        format_time(level.latency_s),
        f"{format_bytes(level.bandwidth_bytes_per_s)}/s",
        f"{fit.message_error:.1%}",
        f"{format_bytes(reduce_bandwidth)}/s" if reduce_bandwidth else "the same",
        "" if fit.all_reduce_error is None else f"{fit.all_reduce_error:.1%}",
        f"{together}, shared" if level.shared else together,
    )
