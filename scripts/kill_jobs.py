"""Kill server, worker and database at random moments, and see that no job is lost or doubled.

Every job that was accepted has to end, in exactly one final state, with at most one result, and
nothing half-stored may ever be read. Exits with 1 if one of that does not hold.

    python scripts/kill_jobs.py [--jobs 50] [--kills 12] [--database sqlite|postgresql|both]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.chaos.clients import FINAL, Gone, Reader, accepted, ask
from scripts.chaos.victims import Database, KilledPostgres, Server
from stagewright.api.http.examples import example_profile
from stagewright.api.store.database import Database as Connections
from stagewright.api.store.database import utc_now
from stagewright.api.store.maintenance import find_faults
from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.api.store.store import Store

JOB_S = 8.0
"""What a job may take on the average, all kills included."""


@dataclass
class Report:
    """Counts of what happened, and of what should not have."""

    kills: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    num_accepted: int = 0
    num_attempts: int = 0
    num_runs: int = 0
    num_plans_read: int = 0
    took_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"  {self.num_accepted} jobs accepted, "
                + ", ".join(f"{number} {state}" for state, number in sorted(self.states.items())),
                f"  {sum(self.kills.values())} kills: "
                + ", ".join(f"{number} of the {what}" for what, number in self.kills.items()),
                f"  {self.num_attempts} attempts, {self.num_runs} runs of the child, "
                f"{self.num_plans_read} plans read meanwhile, {self.took_s:.0f} s",
                *(f"  FAULT: {fault}" for fault in self.faults),
            ]
        )


def kill_jobs(
    address: str,
    folder: Path,
    *,
    num_jobs: int,
    kills: list[str],
    database: Database | None = None,
    pause_s: tuple[float, float] = (0.5, 4.0),
) -> Report:
    """Hand in jobs while things are killed.

    Args:
        address: Of the database.
        folder: For logs.
        num_jobs: How many jobs.
        kills: What to kill, in this order: ``server``, ``worker``, ``database``.
        database: The one to kill.
        pause_s: Between two kills, at least and at most.
    """
    started = time.monotonic()
    deadline = started + 60.0 + JOB_S * num_jobs
    (folder / "profile.json").write_text(json.dumps(example_profile()))
    report = Report()
    server = Server(address, folder)
    reader = Reader(server.url)
    ids: dict[int, str] = {}
    try:
        reader.start()
        handing_in = threading.Thread(
            target=_hand_in, args=(server.url, num_jobs, ids, deadline, report.faults)
        )
        handing_in.start()
        for what in kills:
            time.sleep(random.uniform(*pause_s))
            _kill(what, server, database, report)
        handing_in.join()
        _wait_until_all_ended(server.url, ids, deadline)
    except (Gone, AssertionError, RuntimeError) as error:
        report.faults.append(f"{type(error).__name__}: {error}")
    finally:
        reader.is_over.set()
        reader.join()
        server.end()
    report.took_s = time.monotonic() - started
    report.faults += reader.faults
    report.num_plans_read = reader.num_plans
    _check(address, folder, ids, num_jobs, report)
    return report


def _hand_in(
    url: str, num_jobs: int, ids: dict[int, str], deadline: float, faults: list[str]
) -> None:
    for seed in range(num_jobs):
        try:
            ids[seed] = accepted(url, seed, deadline)
        except (Gone, AssertionError) as error:
            faults.append(f"job {seed} was not accepted: {error}")
        time.sleep(random.uniform(0.0, 0.4))


def _kill(what: str, server: Server, database: Database | None, report: Report) -> None:
    if what == "server":
        server.kill()
    elif what == "worker":
        if not server.kill_worker():
            return
    else:
        assert database is not None, "this database has no process of its own"
        database.kill()
    report.kills[what] += 1


def _wait_until_all_ended(url: str, ids: dict[int, str], deadline: float) -> None:
    waiting = set(ids.values())
    while waiting:
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(waiting)} jobs have not ended: {sorted(waiting)[:3]}")
        with contextlib.suppress(Gone):
            for job_id in sorted(waiting):
                status, job = ask(url, f"/v1/jobs/{job_id}")
                assert status == 200, f"{job_id}, which was accepted, is answered {status}"
                if job["state"] in FINAL:
                    waiting.discard(job_id)
        time.sleep(0.3)


def _check(address: str, folder: Path, ids: dict[int, str], num_jobs: int, report: Report) -> None:
    """Look into the database itself."""
    report.num_accepted = len(ids)
    with contextlib.suppress(OSError):
        runs = (folder / "runs").read_text().splitlines()
        report.num_runs = sum(line.startswith("began") for line in runs)
    faults = report.faults
    if len(set(ids.values())) != num_jobs:
        faults.append(f"{num_jobs} requests became {len(set(ids.values()))} jobs")
    connections = Connections(address, now=utc_now)
    faults += find_faults(connections)
    connections.close()
    store = Store(address)
    results: Counter[str] = Counter()
    try:
        listed = store.jobs.list(DEFAULT_PROJECT, limit=500).items
        if {job.id for job in listed} != set(ids.values()):
            faults.append(f"{len(listed)} jobs are stored, {len(set(ids.values()))} were accepted")
        for job in listed:
            report.states[job.state] += 1
            report.num_attempts += job.attempt
            kinds = [event.kind for event in store.jobs.events(DEFAULT_PROJECT, job.id)]
            ends = [kind for kind in kinds if kind in FINAL]
            if ends != [job.state] or kinds[-1] != job.state:
                faults.append(f"{job.id} is {job.state}, and its events say {kinds}")
            if job.state == "succeeded" and job.result_id is None:
                faults.append(f"{job.id} is {job.state} with result {job.result_id}")
            if job.result_id is not None:
                results[job.result_id] += 1
        stored = {row.id for row in store.documents.plans(DEFAULT_PROJECT, limit=500).items}
        wanted = {found for found in results if found.startswith("plan_")}
        if stored != wanted:
            faults.append(f"{len(stored)} plans are stored, jobs made {len(wanted)}")
        profiles = store.documents.profiles(DEFAULT_PROJECT, limit=500).items
        if len(profiles) != results.total():  # each job measures something else
            faults.append(f"{len(profiles)} profiles are stored, {results.total()} jobs made some")
    finally:
        store.close()


@contextlib.contextmanager
def database_of(kind: str, folder: Path) -> Iterator[tuple[str, Database | None]]:
    """Yield a new database's address, and what to kill of it."""
    if kind == "sqlite":
        yield str(folder / "jobs.db"), None
        return
    from tests.api.postgres_server import postgres_server, why_not

    if reason := why_not():
        raise SystemExit(reason)
    with postgres_server(durable=True) as server:
        yield server.url(server.new_database()), KilledPostgres(server)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    random.seed(seed)
    kinds = ["sqlite", "postgresql"] if arguments.database == "both" else [arguments.database]
    failed = False
    for kind in kinds:
        victims = ["server", "worker"] + ["database"] * (kind == "postgresql")
        kills = [victims[i % len(victims)] for i in range(arguments.kills)]
        random.shuffle(kills)
        print(f"{kind}, seed {seed}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="stagewright-chaos-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            with database_of(kind, folder) as (address, database):
                report = kill_jobs(
                    address, folder, num_jobs=arguments.jobs, kills=kills, database=database
                )
            if report.faults:
                sys.stderr.write((folder / "server.log").read_text()[-20_000:])
        print(report, flush=True)
        failed = failed or bool(report.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
