"""Tables of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.tables import markdown_table

if TYPE_CHECKING:
    from benchmarks.load import Result

NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def page(results: Sequence[Result]) -> str:
    """Markdown: a line for each database, then for each kind of request."""
    return f"{_whole(results)}\n\n{_kinds(results)}"


def _whole(results: Sequence[Result]) -> str:
    names = [NAMES[result.database] for result in results]
    rows = [
        ("requests, by so many clients", lambda r: f"{r.requests:,} by {r.clients}"),
        ("a client's pause before its next request", lambda r: _ms(r.pause_s)),
        ("requests a second", lambda r: f"{r.requests_per_s:.0f}"),
        ("median", lambda r: _ms(r.p50_s)),
        ("99th percentile", lambda r: _ms(r.p99_s)),
        ("longest", lambda r: _ms(r.longest_s)),
        ("answers that were wrong, or 5xx", lambda r: f"{r.wrong}"),
        ("plans made", lambda r: f"{r.plans:,}"),
        ("of them lost", lambda r: f"{r.unread}"),
        ("processor time a request: server", lambda r: f"{r.server_cpu_ms:.2f} ms"),
        ("search for plans", lambda r: f"{r.planning_cpu_ms:.2f} ms"),
        ("database", lambda r: f"{r.database_cpu_ms:.2f} ms" if r.database_cpu_ms else "in server"),
        ("clients' share of all processor time", lambda r: f"{100 * r.client_cpu_share:.0f} %"),
    ]
    if any(result.unpaused_per_s for result in results):
        rows += [
            ("without pauses: requests a second", lambda r: f"{r.unpaused_per_s:.0f}"),
            ("without pauses: 99th percentile", lambda r: _ms(r.unpaused_p99_s)),
        ]
    if any(result.light_ratio for result in results):
        rows += [
            ("gets and lists alone, 99th percentile", lambda r: _ms(r.light_p99_s)),
            ("beside heavy searches", lambda r: _ms(r.heavy_p99_s)),
            ("times as long", lambda r: f"{r.light_ratio:.1f}"),
            ("beside uploads, timelines, traces and searches", lambda r: _ms(r.mixed_p99_s)),
            ("heavy requests answered meanwhile", lambda r: f"{r.heavy_requests}"),
        ]
    if any(result.short_ratio for result in results):
        rows += [
            ("plans of 100 layers alone, 95th percentile", lambda r: _ms(r.short_alone_p95_s)),
            ("beside two heavy searches", lambda r: _ms(r.short_beside_p95_s)),
            ("times as long", lambda r: f"{r.short_ratio:.1f}"),
        ]
    lines = [(name, *map(told, results)) for name, told in rows]
    return markdown_table(("", *names), lines)


def _kinds(results: Sequence[Result]) -> str:
    names = [NAMES[result.database] for result in results]
    head = [f"{name}: {what}" for name in names for what in ("median", "99th percentile")]
    rows = [
        (
            kind,
            f"{number:,}",
            *(_ms(taken_s) for one in results for taken_s in one.kinds.get(kind, (0, 0, 0))[1:]),
        )
        for kind, (number, _, _) in sorted(results[0].kinds.items(), key=lambda e: -e[1][0])
    ]
    return markdown_table(("kind of request", "how many", *head), rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
