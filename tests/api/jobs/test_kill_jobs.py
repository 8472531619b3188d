"""A slice of ``make chaos``: few jobs, one kill each; see scripts/kill_jobs.py for the whole."""

from __future__ import annotations

import random

import pytest

from scripts.kill_jobs import kill_jobs


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_server_and_a_killed_worker_lose_and_double_nothing(tmp_path):
    random.seed(4)
    report = kill_jobs(
        str(tmp_path / "jobs.db"),
        tmp_path,
        num_jobs=6,
        kills=["worker", "server"],
        pause_s=(3.0, 4.0),
    )
    assert not report.faults, f"{report}\n{(tmp_path / 'server.log').read_text()[-5000:]}"
    assert report.kills["server"] == 1
    assert sum(report.states.values()) == report.num_accepted == 6
