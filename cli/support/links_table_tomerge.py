"""Measured links as plain text: a row a level, with how well it predicts what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.text_table import text_table
from ...core.units import count, format_bytes, format_time

if TYPE_CHECKING:
    from ...profiler.links.records import LevelFit, LinkReport

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
        lines += ["", text_table(list(zip(*told, strict=True)))]
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
