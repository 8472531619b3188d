"""What clients may do to the service as it is served, with processes that search and draw.

Causes, each seen on a server with default settings: an 11 MiB body of unknown members took 1.7 GB
and 6 s; drawings of one read key kept those of others waiting for 27 s; a search that was killed
took its plan along, so that more time gave less; ``/readyz`` was 200 while every write was refused;
and a change ignored ``If-Match``.
"""

from __future__ import annotations

import copy
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from stagewright.api.http.examples import example_profile
from tests.api.served import Served, served, wait_until_ready

pytestmark = pytest.mark.timeout(300)

MANY = 10**6
MEMBERS = ",".join(f'"k{number}":0' for number in range(MANY))

FLOODS = {
    "members of a configuration": '{"cluster":"2xcpu","model":{"family":"gpt2","config":{%s}}}',
    "members of a config.json": '{"cluster":"2xcpu","model":{"model_type":"gpt2",%s}}',
    "members of a request": '{"cluster":"2xcpu",%s}',
    "members of a layer": '{"cluster":"2xcpu","profile":{"layers":[{"layer":{%s}}]}}',
    "inputs of a sample": '{"cluster":"2xcpu","model":"gpt2","sample":{"inputs":{%s}}}',
    "arguments of a factory": '{"cluster":"2xcpu","factory":{"name":"x","arguments":{%s}}}',
}
GROWTH_MIB, PROCESSOR_S = 300, 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as server:
        wait_until_ready(server)
        yield server


@pytest.mark.parametrize("flood", FLOODS)
def test_a_million_unknown_members_cost_little(server, flood):
    began_s, before_mib = server.processor_s, server.memory_mib
    server.forget_peak()
    answer = server.ask("POST", "/v1/plans", (FLOODS[flood] % MEMBERS).encode())
    assert answer.status in (413, 422), answer.told()
    assert str(MANY) in answer.told() or "most" in answer.told()
    assert server.peak_mib - before_mib < GROWTH_MIB
    assert server.processor_s - began_s < PROCESSOR_S


@pytest.mark.parametrize(
    "body",
    [
        b'{"cluster":"2xcpu","profile":{"layers":[' + b"{}," * 4 * MANY + b"{}]}}",
        b'{"cluster":"2xcpu","model":{"family":"mlp","config":[' + b"[]," * 4 * MANY + b"[]]}}",
        b'{"cluster":"2xcpu","options":{"pins":[' + b"0," * 4 * MANY + b"0]}}",
    ],
    ids=["objects", "lists", "numbers"],
)
def test_what_a_body_becomes_is_bounded(server, body):
    before_mib = server.memory_mib
    server.forget_peak()
    answer = server.ask("POST", "/v1/plans", body)
    assert answer.status == 413
    assert "values" in answer.told()
    assert server.peak_mib - before_mib < GROWTH_MIB


def test_of_changes_with_one_tag_one_is_made(server):
    plan_id = server.plan().json()["id"]
    path = f"/v1/plans/{plan_id}"
    tag = server.ask("GET", path).headers["etag"]

    def change(number: int) -> int:
        body = {"notes": f"by client {number}"}
        return server.ask("PATCH", path, body, If_Match=tag).status

    with ThreadPoolExecutor(8) as pool:
        found = Counter(pool.map(change, range(8)))
    assert found == {200: 1, 412: 7}
    assert server.ask("DELETE", path, If_Match=tag).status == 412
    tag = server.ask("GET", path).headers["etag"]
    assert server.ask("DELETE", path, If_Match=tag).status == 204


def test_a_server_that_cannot_write_is_not_ready(server):
    with closing(sqlite3.connect(server.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = server.ask("GET", "/readyz")
        assert answer.status == 503
        assert answer.json()["not_ready"] == ["database"]
        other.execute("ROLLBACK")
    wait_until_ready(server)


def test_reads_of_one_project_leave_room_for_others(server):
    """The plan has some 25,000 actions: a drawing takes seconds."""
    profile = uneven_profile(64)
    options = {"num_microbatches": 800, "num_stages": 16}
    made = server.plan(profile=profile, cluster="16x24GB", options=options)
    assert made.status == 201, made.told()
    large, small_of = made.json()["id"], {}
    other = server.key_of_project("another", "read", "plan")
    reader = server.ask("POST", "/v1/api-keys", {"name": "r", "scopes": ["read"]}).json()["secret"]
    small_of[other] = server.plan(token=other).json()["id"]

    def draw(number: int) -> int:
        form = ("svg", "chrome_trace", "timeline")[number % 3]
        return server.ask("GET", f"/v1/plans/{large}?format={form}", token=reader).status

    with ThreadPoolExecutor(60) as pool:
        drawings = [pool.submit(draw, number) for number in range(60)]
        time.sleep(1.0)
        began_s = time.monotonic()
        answer = server.ask("GET", f"/v1/plans/{small_of[other]}?format=svg", token=other)
        took_s = time.monotonic() - began_s
        num_busy = sum(not drawing.done() for drawing in drawings)
        found = Counter(drawing.result() for drawing in drawings)
    assert answer.status == 200
    assert num_busy > 4, "the drawings took no time"
    assert took_s < 10.0
    assert found[429], "one project's calls may all wait"
    assert found.keys() <= {200, 429, 504}, "none ends with its process"


def test_more_time_never_gives_less(tmp_path):
    """On a server that has just been started, whose kernels are still to be compiled."""
    profile, found = uneven_profile(200), {}
    with served(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kernels")) as server:
        for options in ({"num_microbatches": 64}, {"objective": "memory"}):
            answer = server.plan(profile=profile, cluster="64x24GB", options=options, deadline_s=6)
            found[str(options)] = answer.status, answer.json().get("detail")
    assert {status for status, _ in found.values()} == {201}, found


def uneven_profile(num_layers: int) -> dict[str, Any]:
    """Return the example's first layer, so often, each with times of its own."""
    random_times = random.Random(1)
    profile: dict[str, Any] = {**example_profile(), "parameters": [], "storages": []}
    first, boundary = profile["layers"][0], profile["boundaries"][0]
    profile["layers"] = [copy.deepcopy(first) for _ in range(num_layers)]
    for number, layer in enumerate(profile["layers"]):
        layer["layer"].update(name=f"b.{number}", module_fqns=[f"b.{number}"])
        layer["forward"]["median_s"] = random_times.uniform(0.001, 0.01)
        layer["backward"]["median_s"] = random_times.uniform(0.002, 0.02)
    profile["boundaries"] = [{**boundary, "after": after} for after in range(num_layers - 1)]
    return profile
