"""Other projects' things, and requests sent again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

from stagewright.api.http.examples import example_graph, example_profile

from .attack import Attack, Reply, Target

GONE = frozenset({404})


def attacks() -> Iterator[Attack]:
    yield from _others()
    yield from _again()


def _others() -> Iterator[Attack]:
    """Yield what one project made, asked for by a key of another."""

    def of(make: Callable[[Target], str], method: str, path: str) -> Callable[[Target], Reply]:
        return lambda target: target.ask(
            method, path.format(make(target)), token=target.other_token
        )

    for method, path, make in (
        ("GET", "/v1/plans/{}", plan), ("GET", "/v1/plans/{}?format=schedule", plan),
        ("GET", "/v1/plans/{}?format=timeline", plan), ("GET", "/v1/plans/{}?format=svg", plan),
        ("GET", "/v1/profiles/{}", profile), ("GET", "/v1/profiles/{}?format=csv", profile),
        ("GET", "/v1/graphs/{}", graph), ("GET", "/v1/jobs/{}", job),
        ("GET", "/v1/jobs/{}/events", job), ("POST", "/v1/jobs/{}/cancel", job),
        ("DELETE", "/v1/api-keys/{}", key), ("DELETE", "/v1/plans/{}", plan),
        ("DELETE", "/v1/profiles/{}", profile), ("DELETE", "/v1/graphs/{}", graph),
    ):  # fmt: skip
        yield Attack("project", f"{method} {path}", of(make, method, path), GONE, "no ")
    for field, make, rest in (
        ("profile_id", profile, {}), ("graph_id", graph, {}),
        ("graph_id", graph, {"profiling": {"device": "cpu"}}),
    ):  # fmt: skip
        yield Attack(
            "project", f"a plan by its {field}{' (measured)' if rest else ''}",
            lambda target, field=field, make=make, rest=rest: target.post(  # type: ignore[misc]
                "/v1/plans", {field: make(target), "cluster": "2x24GB", **rest},
                token=target.other_token,
            ),
            frozenset({422}), "no ",
        )  # fmt: skip
    yield Attack(
        "project", "a simulation by its plan_id",
        lambda target: target.post(
            "/v1/simulations", {"plan_id": plan(target)}, token=target.other_token
        ),
        frozenset({422}), "no plan",
    )  # fmt: skip


def _again() -> Iterator[Attack]:
    body = {"profile": example_profile(), "cluster": "2x24GB"}

    def same(target: Target) -> Reply:
        named = {"Idempotency-Key": uuid.uuid4().hex}
        first, again = (target.post("/v1/plans", body, headers=named) for _ in range(2))
        if (first.status, first.body) != (again.status, again.body):
            return Reply(599, body=b"the second answer is another")
        if "idempotency-replayed" not in again.headers:
            return Reply(599, body=b"the second was made anew")
        return again

    def other(target: Target) -> Reply:
        named = {"Idempotency-Key": uuid.uuid4().hex}
        target.post("/v1/plans", body, headers=named)
        return target.post("/v1/plans", {**body, "cluster": "4x24GB"}, headers=named)

    def elsewhere(target: Target) -> Reply:
        """Another project's key of the same name is another key."""
        named = {"Idempotency-Key": uuid.uuid4().hex}
        target.post("/v1/plans", body, headers=named)
        answer = target.post("/v1/plans", {}, headers=named, token=target.other_token)
        replayed = "idempotency-replayed" in answer.headers
        return Reply(599, body=b"another project's answer") if replayed else answer

    def other_route(target: Target) -> Reply:
        named = {"Idempotency-Key": uuid.uuid4().hex}
        target.post("/v1/profiles", example_profile(), headers=named)
        return target.post("/v1/graphs", example_graph(), headers=named)

    yield Attack("again", "a key with the same body", same, frozenset({201}), "plan_")
    yield Attack("again", "a key with another body", other, frozenset({422}), "another")
    yield Attack("again", "a key of another project", elsewhere, frozenset({422}))
    yield Attack("again", "a key on another route", other_route, frozenset({422}))


def plan(target: Target) -> str:
    body = {"profile": example_profile(), "cluster": "2x24GB"}
    return str(target.post("/v1/plans", body).json()["id"])


def profile(target: Target) -> str:
    return str(target.post("/v1/profiles", example_profile()).json()["id"])


def graph(target: Target) -> str:
    return str(target.post("/v1/graphs", example_graph()).json()["id"])


def job(target: Target) -> str:
    """One that ends at once: it is cancelled by whoever made it."""
    body = {
        "model": {"family": "mlp"},
        "sample": {"inputs": {"input": {"shape": [2, 64]}}},
        "profiling": {"budget_s": 0.01},
    }
    made = str(target.post("/v1/profile-jobs", body).json()["id"])
    target.ask("POST", f"/v1/jobs/{made}/cancel")
    return made


def key(target: Target) -> str:
    made = target.post("/v1/api-keys", {"name": "a key", "scopes": ["read"]}).json()
    return str(made["key"]["id"])
