"""Two hundred clients at once, then heavy requests beside light ones; for each database.

    python benchmarks/load.py
    python benchmarks/load.py --requests 2000 --clients 50 --database sqlite --json

The server is a process as ``stagewright serve`` starts it; the clients are two more, on the same
machine. Each client sends its next request 1.25 s after it has its answer, and in a second run at
once. Every answer is compared with what it has to be (`loading/mix.py`), and afterwards
every plan that was answered 201 is read again.

requests_per_s    answered, over the whole run
p50_s, p99_s      from sending to the last byte, all kinds of requests together
server_cpu_ms     processor time of the server's process for each request; does not depend on what
                  else the machine does
planning_cpu_ms   of the processes that search for plans
database_cpu_ms   of PostgreSQL's processes
client_cpu_share  of the processor time all of these took
light_ratio       99th percentile of gets and lists while a plan of 1,000 layers on 512 devices is
                  searched for, again and again, over the same without
short_ratio       95th percentile of plans of 100 layers on 8 devices beside two such searches, over
                  the same without
mixed_p99_s       the same beside uploads of 4 MB, timelines, traces and searches

Exit code 1 if anything was lost or wrong, or a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.loading.clients import Task, Told  # noqa: E402
from benchmarks.loading.heavy import Heavy, post  # noqa: E402
from benchmarks.loading.page import page  # noqa: E402
from benchmarks.loading.server import Server, cpu_s, served  # noqa: E402
from benchmarks.loading.short import measure_short_plans  # noqa: E402
from benchmarks.tables import write_between_marks  # noqa: E402
from stagewright.planner import numba_cache as compiling  # noqa: E402
from tests.api.postgres_server import postgres_server, why_not  # noqa: E402

PROFILES = sorted((ROOT / "benchmarks" / "profiles").glob("*.json"))
DATABASES = ("sqlite", "postgresql")
PROCESSES = 2
LEAST_PER_S, MOST_P99_S, MOST_RATIO = 100.0, 1.0, 5.0
MOST_SHORT_RATIO = 2.0
WARM_UP = 40
LIGHT_CLIENTS, LIGHT_PAUSE_S = 20, 0.2
PAUSE_S = 1.25


@dataclass
class Result:
    """Measurements of one database; see the top of this file."""

    database: str
    clients: int
    requests: int
    pause_s: float = 0.0
    requests_per_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    longest_s: float = 0.0
    server_cpu_ms: float = 0.0
    planning_cpu_ms: float = 0.0
    database_cpu_ms: float = 0.0
    client_cpu_share: float = 0.0
    plans: int = 0
    wrong: int = 0
    unread: int = 0
    unpaused_per_s: float = 0.0
    unpaused_p99_s: float = 0.0
    light_p99_s: float = 0.0
    heavy_p99_s: float = 0.0
    mixed_p99_s: float = 0.0
    heavy_requests: int = 0
    light_ratio: float = 0.0
    short_alone_p95_s: float = 0.0
    short_beside_p95_s: float = 0.0
    short_ratio: float = 0.0
    kinds: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def misses(self) -> list[str]:
        """Return what does not hold."""
        found = [f"{self.wrong} answers were wrong"] if self.wrong else []
        found += [f"{self.unread} plans were lost"] if self.unread else []
        if self.requests_per_s < LEAST_PER_S:
            found.append(f"{self.requests_per_s:.0f} requests a second, not {LEAST_PER_S:.0f}")
        if self.p99_s >= MOST_P99_S:
            found.append(f"a 99th percentile of {self.p99_s:.2f} s, not under {MOST_P99_S:.0f} s")
        if self.light_ratio > MOST_RATIO:
            found.append(f"light requests took {self.light_ratio:.1f} times as long beside a heavy")
        if self.short_ratio > MOST_SHORT_RATIO:
            found.append(f"short plans took {self.short_ratio:.1f} times as long beside heavy ones")
        return [f"{self.database}: {miss}" for miss in found]


def main() -> int:
    """0 if every limit was met."""
    options = _arguments()
    results = []
    for database in options.database or DATABASES:
        reason = why_not() if database == "postgresql" else None
        if reason is not None:
            sys.stderr.write(f"{database}: {reason}\n")
            return 1
        results.append(measure(database, options))
        _say(results[-1])
    misses = [miss for result in results for miss in result.misses()]
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    else:
        print(page(results))
    if options.write:
        write_between_marks(Path(options.write), Path(__file__).name, page(results))
    for miss in misses:
        sys.stderr.write(f"missed: {miss}\n")
    return int(bool(misses))


def measure(database: str, options: argparse.Namespace) -> Result:
    """Both measurements on one server."""
    result = Result(database, options.clients, options.requests, options.pause_s)
    subprocess.run([sys.executable, "-m", compiling.__name__], check=True)  # once, and not beside
    with tempfile.TemporaryDirectory(prefix="stagewright-load-") as name, ExitStack() as stack:
        folder = Path(name)
        address, database_pid = stack.enter_context(_database(database, folder))
        server = stack.enter_context(served(address, folder, PROCESSES))
        profiles = [store_profiles(server, token) for token in server.tokens]
        _clients(server, profiles, clients=2, requests=WARM_UP)
        before = _used(server, database_pid)
        told = _clients(
            server,
            profiles,
            clients=options.clients // PROCESSES,
            requests=options.requests // PROCESSES,
            first_number=10 * WARM_UP,
            pause_s=options.pause_s,
        )
        after = _used(server, database_pid)
        _summarise(result, told, [end - begin for begin, end in zip(before, after, strict=True)])
        if options.pause_s and options.unpaused_requests:
            _without_pauses(result, server, profiles, options)
        if options.light_requests:
            _beside_heavy(result, server, profiles, options.light_requests)
        if options.short_requests:
            alone, beside, _ = measure_short_plans(server, options.short_requests)
            result.short_alone_p95_s, result.short_beside_p95_s = map(_p95, (alone, beside))
            result.short_ratio = result.short_beside_p95_s / result.short_alone_p95_s
        if "Traceback" in server.log.read_text():
            result.wrong += 1
            result.told.append("the server's log has a traceback")
    return result


@contextmanager
def _database(database: str, folder: Path) -> Iterator[tuple[str, int | None]]:
    """Yield the address of a new database and the process that serves it, if one does."""
    if database == "sqlite":
        yield str(folder / "load.db"), None
        return
    with postgres_server(durable=True) as server:
        yield server.url(server.new_database()), server.process.pid


def store_profiles(server: Server, token: str) -> list[tuple[str, int]]:
    """Store the measured profiles of this repository: their ids, and how many layers each has."""
    found = []
    for path in PROFILES:
        document = json.loads(path.read_text())
        stored = post(server, token, "/v1/profiles", document)
        found.append((str(stored["id"]), len(document["layers"])))
    return found


def _clients(server: Server, profiles: list[list[tuple[str, int]]], **task: Any) -> list[Told]:
    """Run processes of clients side by side."""
    processes = []
    for part, token in enumerate(server.tokens):
        one = Task(
            server.host, server.port, token, profiles[part], part=part, parts=PROCESSES, seed=part,
            **task,
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loading.clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(one)))
        process.stdin.close()
        processes.append(process)
    told = []
    for process in processes:
        assert process.stdout is not None
        text = process.stdout.read()
        if process.wait() != 0:
            raise SystemExit("a process of clients failed; see above")
        told.append(Told(**json.loads(text)))
    return told


def _used(server: Server, database_pid: int | None) -> tuple[float, float, float]:
    """Processor time so far of what answers, plans, and stores."""
    stores = 0.0 if database_pid is None else cpu_s(database_pid, children=True)
    return cpu_s(server.pid, children=False), cpu_s(server.pid, children=True), stores


def _summarise(result: Result, told: list[Told], used_s: list[float]) -> None:
    kinds: dict[str, list[float]] = {}
    for one in told:
        for kind, latencies in one.latencies_s.items():
            kinds.setdefault(kind, []).extend(latencies)
        result.plans += one.made
        result.wrong += one.num_wrong
        result.unread += one.unread
        result.told += one.wrong
    every = [latency for latencies in kinds.values() for latency in latencies]
    took_s = max(one.end for one in told) - min(one.begin for one in told)
    result.requests = len(every)
    result.requests_per_s = len(every) / took_s
    result.p50_s, result.p99_s, result.longest_s = _middle(every), _late(every), max(every)
    result.kinds = {
        kind: (len(latencies), _middle(latencies), _late(latencies))
        for kind, latencies in kinds.items()
    }
    num_read = sum(one.made for one in told)  # each once more at the end
    answers = len(every) + num_read
    result.server_cpu_ms, result.planning_cpu_ms, result.database_cpu_ms = (
        1e3 * used / answers for used in used_s
    )
    clients_s = sum(one.cpu_s for one in told)
    result.client_cpu_share = clients_s / (clients_s + sum(used_s))


def _without_pauses(
    result: Result,
    server: Server,
    profiles: list[list[tuple[str, int]]],
    options: argparse.Namespace,
) -> None:
    """Every client waits for an answer all the time."""
    told = _clients(
        server,
        profiles,
        clients=options.clients // PROCESSES,
        requests=options.unpaused_requests // PROCESSES,
        first_number=50_000,
    )
    every = [each for one in told for kind in one.latencies_s.values() for each in kind]
    took_s = max(one.end for one in told) - min(one.begin for one in told)
    result.unpaused_per_s, result.unpaused_p99_s = len(every) / took_s, _late(every)
    result.plans += sum(one.made for one in told)
    result.wrong += sum(one.num_wrong for one in told)
    result.unread += sum(one.unread for one in told)
    result.told += [line for one in told for line in one.wrong]


def _beside_heavy(
    result: Result, server: Server, profiles: list[list[tuple[str, int]]], requests: int
) -> None:
    """Light requests alone, then beside heavy ones."""
    task: dict[str, Any] = {
        "clients": LIGHT_CLIENTS // PROCESSES,
        "requests": requests // PROCESSES,
        "pause_s": LIGHT_PAUSE_S,
        "light": True,
    }
    heavies: dict[str, Callable[[], Heavy | None]] = {
        "light_p99_s": lambda: None,
        "heavy_p99_s": lambda: Heavy(server, searches_only=True),
        "mixed_p99_s": lambda: Heavy(server),
    }
    for number, (key, make) in enumerate(heavies.items(), 1):
        heavy, stop = make(), threading.Event()
        if heavy is not None:
            heavy.start(stop)
        told = _clients(server, profiles, first_number=100_000 * number, **task)
        stop.set()
        if heavy is not None:
            result.heavy_requests += heavy.end()
            result.wrong += heavy.num_wrong
            result.told += heavy.wrong
        result.wrong += sum(one.num_wrong for one in told)
        result.told += [line for one in told for line in one.wrong]
        every = [each for one in told for kind in one.latencies_s.values() for each in kind]
        setattr(result, key, _late(every))
    result.light_ratio = result.heavy_p99_s / result.light_p99_s


def _middle(values: list[float]) -> float:
    return statistics.median(values)


def _late(values: list[float]) -> float:
    """Return the 99th percentile: one in a hundred is at least as late."""
    return sorted(values)[max(0, int(0.99 * len(values)) - 1)]


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, int(0.95 * len(values)) - 1)]


def _say(result: Result) -> None:
    sys.stderr.write(page([result]) + "\n")
    for line in result.told:
        sys.stderr.write(f"wrong: {line}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--pause-s", type=float, default=PAUSE_S, help="of a client, before its next request"
    )
    parser.add_argument(
        "--unpaused-requests", type=int, default=4_000, help="without pauses; 0 leaves them out"
    )
    parser.add_argument("--light-requests", type=int, default=2_000, help="0 leaves them out")
    parser.add_argument("--short-requests", type=int, default=80, help="0 leaves them out")
    parser.add_argument("--database", action="append", choices=DATABASES, help="all by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", help="the document to write the table into")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
