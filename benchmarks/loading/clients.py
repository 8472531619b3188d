"""A process of clients: ``python -m benchmarks.loading.clients``, its task as JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from benchmarks.loading.connection import Connection
from benchmarks.loading.mix import ASK, LIGHT, WEIGHTS, Book, Wrong, digest, new_plan

MAX_TOLD = 20


@dataclass(frozen=True)
class Task:
    """Work of one process of clients.

    Attributes:
        clients: Connections, each of which sends its next request when it has its answer.
        requests: In all.
        part: Which of the processes this is.
        pause_s: Between an answer and the next request of the same client.
        light: Only what reads.
        first_plans: Made before the clock starts, so that there is something to read.
    """

    host: str
    port: int
    token: str
    profiles: list[tuple[str, int]]
    clients: int
    requests: int
    part: int = 0
    parts: int = 1
    pause_s: float = 0.0
    light: bool = False
    first_plans: int = 10
    first_number: int = 0
    seed: int = 0


@dataclass
class Told:
    """Findings of one process of clients.

    Attributes:
        latencies_s: Of every kind of request.
        wrong: Answers that were not what they have to be, some of them in words.
        num_wrong: How many there were.
        made: How many plans were answered 201.
        unread: Of those, how many could not be read afterwards as they were.
        begin, end: By the machine's clock.
        cpu_s: Processor time of this process.
    """

    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0
    made: int = 0
    unread: int = 0
    begin: float = 0.0
    end: float = 0.0
    cpu_s: float = 0.0

    def note(self, error: Exception) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MAX_TOLD:
            self.wrong.append(f"{type(error).__name__}: {error}"[:500])


async def load(task: Task) -> Told:
    """Send everything, then read every plan once more."""
    told = Told()
    book = Book(task.profiles, task.part, task.parts, Random(task.seed))
    book.number = task.first_number
    first = Connection(task.host, task.port, task.token)
    for _ in range(task.first_plans):
        await new_plan(first, book)
    first.close()
    kinds = _kinds(task, book.random)
    cpu_before, told.begin = _cpu_s(), time.time()
    await asyncio.gather(
        *(_client(task, book, kinds, told, number) for number in range(task.clients))
    )
    told.end, told.cpu_s = time.time(), _cpu_s() - cpu_before
    told.made = len(book.made)
    await _read_all(task, book, told)
    return told


async def _client(task: Task, book: Book, kinds: list[str], told: Told, number: int) -> None:
    """One client: takes the next kind of request until there is none."""
    connection = Connection(task.host, task.port, task.token)
    await asyncio.sleep(task.pause_s * number / task.clients)
    while kinds:
        kind = kinds.pop()
        begin = time.perf_counter()
        try:
            await ASK[kind](connection, book)
        except (Wrong, OSError, EOFError, ValueError, KeyError) as error:
            told.note(error)
            if not isinstance(error, Wrong):
                connection.close()
        told.latencies_s.setdefault(kind, []).append(time.perf_counter() - begin)
        if task.pause_s:
            await asyncio.sleep(task.pause_s)
    connection.close()


async def _read_all(task: Task, book: Book, told: Told) -> None:
    """Nothing is lost: every plan can be read, and stands in the list once."""
    connection = Connection(task.host, task.port, task.token)
    for made in book.made:
        answer = await connection.ask("GET", f"/v1/plans/{made.id}")
        if answer.status != 200 or digest(answer.body) != made.digest:
            told.unread += 1
            told.note(Wrong(f"{made.id} was made and cannot be read: {answer.status}"))
    listed: list[str] = []
    cursor = ""
    while True:
        answer = await connection.ask("GET", f"/v1/plans?limit=500{cursor}")
        page = json.loads(answer.body)
        listed += [entry["id"] for entry in page["plans"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    missing = {made.id for made in book.made} - set(listed)
    if missing or len(set(listed)) != len(listed):
        told.unread += len(missing)
        told.note(Wrong(f"the list lacks {len(missing)} plans of {len(book.made)}, or repeats"))
    connection.close()


def _kinds(task: Task, random: Random) -> list[str]:
    """Return what is asked, in what order."""
    names = list(LIGHT) if task.light else list(WEIGHTS)
    weights = [WEIGHTS[name] for name in names]
    return random.choices(names, weights, k=task.requests)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    given: dict[str, Any] = json.load(sys.stdin)
    told = asyncio.run(load(Task(**given)))
    json.dump(asdict(told), sys.stdout)


if __name__ == "__main__":
    main()
