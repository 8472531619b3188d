"""The tables of docs/evidence/pipedream.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tables import markdown_table

from pipedream_study.results import Result
from stagewright.core.units import format_time

TOLERANCE = 1e-9
"""Relative difference from an expected value that is put down to rounding."""

Expected = Mapping[tuple[str, tuple[int, ...], tuple[float, ...]], float]
"""By profile, machines and bandwidths: what another optimizer answered, in seconds."""


def wanted_s(expected: Expected, result: Result) -> float | None:
    column = result.column
    return expected.get((result.profile, column.machines, column.bandwidths_bytes_per_s))


def is_equal(value_s: float, expected_s: float) -> bool:
    return math.isclose(value_s, expected_s, rel_tol=TOLERANCE)


def document(found: Mapping[str, Sequence[Result]], expected: Expected) -> str:
    """One section an objective."""
    sections = []
    for objective, results in found.items():
        if results[0].own is None:
            body = f"{values(results, expected)}\n\n{values_summary(results, expected)}"
        else:
            body = f"{gains(results)}\n\n{gains_summary(results)}"
        sections.append(f"## `{objective}`\n\n{body}")
    return "\n\n".join(sections)


def values(results: Sequence[Result], expected: Expected) -> str:
    rows = []
    for result in results:
        wanted = wanted_s(expected, result)
        rows.append(
            (
                result.profile,
                result.column.name,
                f"{result.time_s:.10g}",
                "" if wanted is None else f"{wanted:.10g}",
                "" if wanted is None else ("yes" if is_equal(result.time_s, wanted) else "**no**"),
                f"{result.gap:.0e}" if result.gap else "0",
                format_time(result.solve_s),
            )
        )
    return markdown_table(
        ("profile", "cluster", "value, s", "expected, s", "equal to 1e-9", "gap", "solved in"), rows
    )


def values_summary(results: Sequence[Result], expected: Expected) -> str:
    pairs = [(result.time_s, wanted_s(expected, result)) for result in results]
    compared = [is_equal(value, wanted) for value, wanted in pairs if wanted is not None]
    return (
        f"{sum(compared)} of {len(compared)} expected values equal to 1e-9. "
        f"{len(results)} splits in {total_s(results):.1f} s; largest gap "
        f"{max(result.gap for result in results):.1e}."
    )


def gains(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        assert result.own is not None
        theirs = result.own.pipedream
        rows.append(
            (
                result.profile,
                result.column.name,
                format_time(result.time_s),
                "cannot be placed" if theirs.time_s is None else format_time(theirs.time_s),
                "" if result.gain is None else f"{result.gain:.1%}",
                f"{result.gap:.1e}",
                format_time(result.solve_s),
                replicas(result.stages),
                replicas(theirs.stages),
                theirs.placement or "",
            )
        )
    head = (
        "profile", "cluster", "plan", "PipeDream", "plan over PipeDream", "gap", "solved in",
        "plan: devices a stage", "PipeDream: devices a stage", "placed",
    )  # fmt: skip
    return markdown_table(head, rows, left=2)


def gains_summary(results: Sequence[Result]) -> str:
    found = [result.gain for result in results if result.gain is not None]
    lines = [
        f"{len(results)} plans in {total_s(results):.1f} s; largest gap "
        f"{max(result.gap for result in results):.1e}."
    ]
    if found:
        lines.append(
            f"Gain: median {statistics.median(found):.1%}, from {min(found):.1%} to "
            f"{max(found):.1%} ({len(found)} rows)."
        )
    whole = sum(len(result.stages) == 1 for result in results)
    lines.append(f"The plan is copies of the whole model, no pipeline, in {whole} rows.")
    return " ".join(lines)


def total_s(results: Sequence[Result]) -> float:
    return sum(result.solve_s for result in results)


def replicas(stages: Sequence[Mapping[str, int]]) -> str:
    return " ".join(str(stage["replicas"]) for stage in stages)
