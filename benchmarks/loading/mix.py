"""Mix of requests that clients send, and checks of their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.loading.connection import Answer, Connection

WEIGHTS = {
    "new plan": 5,
    "same plan again": 10,
    "idempotent replay": 5,
    "get plan": 42,
    "get profile": 4,
    "schedule": 4,
    "list": 18,
    "what-if": 8,
    "comparison": 4,
}
"""In a hundred requests."""

LIGHT = ("get plan", "list")
MICROBATCHES = (4, 8, 16, 32)
FIRST_GB = 20


class Wrong(Exception):
    """An answer that is not what it has to be."""


@dataclass(frozen=True)
class Made:
    """A plan that was answered 201, and what the answer was."""

    id: str
    request: bytes
    key: str
    digest: str
    step_time_s: float | None


@dataclass
class Book:
    """Record of what one process of clients made, and of the answers it still expects.

    Attributes:
        profiles: Ids of stored profiles, with how many layers each has.
        part: Which of the processes this is: no two ask for the same new plan.
        parts: How many there are.
        made: Every plan answered 201.
    """

    profiles: list[tuple[str, int]]
    part: int
    parts: int
    random: Random
    made: list[Made] = field(default_factory=list)
    number: int = 0

    def next_request(self) -> tuple[str, int, int, dict[str, Any]]:
        """Return a request nobody made before: profile id, devices, micro-batches and the body."""
        number = self.number * self.parts + self.part
        self.number += 1
        profile, _ = self.profiles[number % len(self.profiles)]
        number //= len(self.profiles)
        devices = 2 + number % 7
        number //= 7
        microbatches = MICROBATCHES[number % len(MICROBATCHES)]
        memory_gb = FIRST_GB + number // len(MICROBATCHES)
        body = {
            "profile_id": profile,
            "cluster": f"{devices}x{memory_gb}GB",
            "options": {"num_microbatches": microbatches, "schedule": "1f1b"},
        }
        return profile, devices, microbatches, body


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def expect(answer: Answer, status: int, what: str) -> None:
    if answer.status != status:
        raise Wrong(f"{what}: {answer.status} instead of {status}: {answer.body[:200]!r}")


async def new_plan(connection: Connection, book: Book) -> None:
    """Return a plan that is not stored yet: it has to be the answer to this very request."""
    profile, devices, microbatches, body = book.next_request()
    sent = json.dumps(body).encode()
    key = f"key-{book.part}-{book.number}"
    answer = await connection.ask("POST", "/v1/plans", sent, f"Idempotency-Key: {key}\r\n")
    expect(answer, 201, "a new plan")
    stored = json.loads(answer.body)
    asked = (profile, devices, microbatches)
    got = (
        stored["profile_id"],
        len(stored["cluster"]["devices"]),
        stored["options"]["num_microbatches"],
    )
    if got != asked:
        raise Wrong(f"a new plan: asked for {asked}, got {got}")
    if answer.headers.get("location") != f"/v1/plans/{stored['id']}":
        raise Wrong(f"a new plan {stored['id']} is said to be at {answer.headers.get('location')}")
    if "stagewright-reused" in answer.headers or "idempotency-replayed" in answer.headers:
        raise Wrong(f"a new plan is said to be old: {answer.headers}")
    step_time_s = stored["plan"]["step_time_s"] if stored["plan"] else None
    book.made.append(Made(stored["id"], sent, key, digest(answer.body), step_time_s))


async def same_plan_again(connection: Connection, book: Book) -> None:
    made = book.random.choice(book.made)
    answer = await connection.ask("POST", "/v1/plans", made.request)
    expect(answer, 201, "the same plan again")
    _same(answer, made)
    if answer.headers.get("stagewright-reused") != "plan":
        raise Wrong(f"{made.id} was planned twice")


async def idempotent_replay(connection: Connection, book: Book) -> None:
    made = book.random.choice(book.made)
    header = f"Idempotency-Key: {made.key}\r\n"
    answer = await connection.ask("POST", "/v1/plans", made.request, header)
    expect(answer, 201, "a replay")
    _same(answer, made)
    if answer.headers.get("idempotency-replayed") != "true":
        raise Wrong(f"the request of {made.id}, sent again with its key, was answered anew")


async def get_plan(connection: Connection, book: Book) -> None:
    made = book.random.choice(book.made)
    answer = await connection.ask("GET", f"/v1/plans/{made.id}")
    expect(answer, 200, "a stored plan")
    _same(answer, made)


async def get_profile(connection: Connection, book: Book) -> None:
    profile, num_layers = book.random.choice(book.profiles)
    answer = await connection.ask("GET", f"/v1/profiles/{profile}")
    expect(answer, 200, "a stored profile")
    found = json.loads(answer.body)
    if (found["id"], len(found["profile"]["layers"])) != (profile, num_layers):
        raise Wrong(f"{profile} has {num_layers} layers; got {found['id']}")


async def schedule(connection: Connection, book: Book) -> None:
    made = book.random.choice(book.made)
    answer = await connection.ask("GET", f"/v1/plans/{made.id}?format=schedule")
    if made.step_time_s is not None:
        expect(answer, 200, "a schedule")


async def list_plans(connection: Connection, book: Book) -> None:
    owed = min(20, len(book.made))
    answer = await connection.ask("GET", "/v1/plans?limit=20")
    expect(answer, 200, "a list")
    shown = len(json.loads(answer.body)["plans"])
    if shown < owed:
        raise Wrong(f"at least {owed} plans were stored before, a list shows {shown}")


async def what_if(connection: Connection, book: Book) -> None:
    made = book.random.choice(book.made)
    body = json.dumps({"plan_id": made.id}).encode()
    answer = await connection.ask("POST", "/v1/simulations", body)
    if made.step_time_s is None:
        return
    expect(answer, 200, "a what-if")
    found = json.loads(answer.body)["plan"]["step_time_s"]
    if abs(found - made.step_time_s) > 1e-6 * made.step_time_s:
        raise Wrong(f"{made.id} takes {made.step_time_s} s, its simulation {found} s")


async def comparison(connection: Connection, book: Book) -> None:
    if len(book.made) < 2:
        return
    chosen = book.random.sample(book.made, 2)
    body = json.dumps({"plan_ids": [made.id for made in chosen]}).encode()
    answer = await connection.ask("POST", "/v1/comparisons", body)
    expect(answer, 200, "a comparison")
    found = [(entry["id"], entry["step_time_s"]) for entry in json.loads(answer.body)["plans"]]
    if found != [(made.id, made.step_time_s) for made in chosen]:
        raise Wrong(f"asked for {[made.id for made in chosen]}, compared {found}")


def _same(answer: Answer, made: Made) -> None:
    if digest(answer.body) != made.digest:
        raise Wrong(f"{made.id} is not what it was when it was made: {answer.body[:100]!r}")


ASK: dict[str, Callable[[Connection, Book], Awaitable[None]]] = {
    "new plan": new_plan,
    "same plan again": same_plan_again,
    "idempotent replay": idempotent_replay,
    "get plan": get_plan,
    "get profile": get_profile,
    "schedule": schedule,
    "list": list_plans,
    "what-if": what_if,
    "comparison": comparison,
}
