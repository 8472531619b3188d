"""A part of `make hostile`, without the heaviest: every attack fails, and would be seen.

What a defect looks like is tried too: a server that unpickled, wrote outside, answered 500, told
another project, or ran out of memory has to be found by the same code.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.hostile import left_wrong, memory_wrongs
from scripts.hostility import server as hostile_server
from scripts.hostility.archives import Touches, poison
from scripts.hostility.attack import Attack, Reply, Target, wrong_with
from scripts.hostility.corpus import corpus
from scripts.hostility.server import Scene, attacked
from scripts.hostility.wire import exchange

GROUPS = (
    "json", "number", "graph", "text", "kind", "code", "pickle", "bomb", "archive", "bounds",
    "host", "framing", "line", "header", "project", "again", "stream", "upload", "flood", "read",
)  # fmt: skip
ATTACKS_OF_A_GROUP = 8
"""`make hostile` sends all."""

TOO_LONG_FOR_THE_SUITE = (
    "50,002 operations",
    "20,002 layers",
    "a huge length",
    "sign-ins without end",
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with attacked(tmp_path_factory.mktemp("hostile")) as scene:
        yield scene


@pytest.fixture(scope="module")
def attacks() -> list[Attack]:
    return [
        attack
        for attack in corpus()
        if not (attack.is_heavy or attack.name in TOO_LONG_FOR_THE_SUITE)
    ]


def test_there_are_enough_of_every_sort(attacks):
    assert len({(attack.group, attack.name) for attack in attacks}) == len(attacks) > 150
    assert {*GROUPS} <= {attack.group for attack in attacks}


@pytest.mark.parametrize("group", GROUPS)
def test_every_attack_fails(scene, attacks, group):
    """Up to `ATTACKS_OF_A_GROUP` of each group, spread over it."""
    wrongs = []
    those = [attack for attack in attacks if attack.group == group]
    for attack in those[:: math.ceil(len(those) / ATTACKS_OF_A_GROUP)]:
        wrong = wrong_with(attack, attack.send(scene.target))
        wrongs += [f"{attack.name}: {wrong}"] if wrong else []
    assert wrongs == []
    assert left_wrong(scene) == ""
    assert memory_wrongs(scene) == []
    assert scene.watched.server_bytes > 2**25, "nobody looked"


ATTACK = Attack("x", "y", lambda _: Reply(0), words="why")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(201, "application/json", b"{}"), "answered 201"),
        (Reply(500, "application/problem+json", b'{"detail": "why"}'), "answered 500"),
        (Reply(0), "answered 0"),
        (Reply(422, "application/problem+json", b'{"detail": "no"}'), "does not mention 'why'"),
        (Reply(422, "text/plain", b"why"), "no problem document"),
    ],
)
def test_a_wrong_answer_is_seen(reply, words):
    assert words in wrong_with(ATTACK, reply)
    assert not wrong_with(ATTACK, Reply(422, "application/problem+json", b'{"detail": "why"}'))


def test_code_that_ran_is_seen(scene):
    marker = scene.folder / "markers" / "x"
    touches, arguments = Touches(str(marker)).__reduce__()
    assert poison(scene.folder / "markers", "x")
    touches(*arguments)
    assert str(marker) in left_wrong(scene)
    marker.unlink()


@pytest.mark.parametrize("place", ["data/ran", "home/.cache", "markers/x"])
def test_a_file_where_none_should_be_is_seen(scene, place):
    (scene.folder / place).touch()
    assert Path(place).name in left_wrong(scene)
    (scene.folder / place).unlink()


def test_memory_is_seen(scene, monkeypatch):
    monkeypatch.setattr("scripts.limits.SERVER_BYTES", 2**20)
    assert "the server had" in memory_wrongs(scene)[0]


@pytest.mark.parametrize(
    ("body", "late_s", "words"),
    [
        (b'{"deadline_s": 0.5}', -0.5, "its deadline is 0.5 s, and"),
        (b"{}", -20.0, "its deadline is 20 s, and"),
        (b"{}", 2.0, ""),
    ],
)
def test_a_late_answer_is_seen(scene, monkeypatch, body, late_s, words):
    """By the request's own deadline where it has one, else by the server's."""
    monkeypatch.setattr("scripts.limits.LATE_S", late_s)
    scene.target.ask("POST", "/v1/plans", body)
    told = left_wrong(scene)
    scene.target.late.clear()
    assert words in told
    assert told.startswith("POST /v1/plans took") == bool(words)


def test_a_server_that_hangs_is_seen(monkeypatch):
    """Neither an answer nor the end of the connection: it passed for a closed one."""
    monkeypatch.setattr("scripts.hostility.wire.CLOSES_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        target = Target("127.0.0.1", hanging.getsockname()[1], "", "", Path())
        reply = exchange(target, b"GET / HTTP/1.1\r\n\r\n")
    assert "answered 598" in wrong_with(ATTACK, reply)


@pytest.mark.parametrize(
    ("attack", "bound", "words"),
    [
        ("280 streams of 14 keys", "MAX_STREAMS", "streams were open at once"),
        ("40 bodies cut off, of 4 keys", "KEY_BYTES", "bodies were held at once"),
    ],
)
def test_more_held_than_the_bound_is_seen(scene, attacks, monkeypatch, attack, bound, words):
    """As if the server allowed more than it says: the attack is told a bound below the real one."""
    monkeypatch.setattr(f"scripts.hostility.holding.{bound}", 100)
    (one,) = (found for found in attacks if found.name == attack)
    assert words in wrong_with(one, one.send(scene.target))


def test_names_that_lead_out_are_looked_for_where_they_lead(scene, monkeypatch, tmp_path):
    outside = tmp_path / "stagewright-outside"
    monkeypatch.setattr(hostile_server, "OUTSIDE", (str(outside),))
    assert not scene.found()
    os.symlink("nowhere", outside)
    assert scene.found() == [str(outside)]
