"""The sandbox holds against probes that try to escape, and each probe finds the hole it is for.

Probes that find nothing say little unless they find a hole: each is tried against a sandbox with
one. Vulnerabilities of the kernel cannot be tested.
"""

from __future__ import annotations

import os

import pytest

from stagewright.api.sandbox.bubblewrap import Sandbox, find_sandbox
from stagewright.core.errors import Refused
from tests.api.sandbox import escape_attempts
from tests.api.sandbox.escape_attempts import (
    answer,
    bait,
    left_behind,
    note,
    overstepping,
    try_to_escape,
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return find_sandbox()
    except Refused as error:
        pytest.skip(f"no sandbox can be had here: {error}")


def hole(change):
    """A class of sandboxes whose command line is changed."""

    class WithHole(Sandbox):
        def around(self, command, environment, filter_fd=None):
            return change(super().around(command, environment, filter_fd))

    return WithHole


def adding(*added):
    def change(words):
        end = words.index("--remount-ro")
        return [*words[:end], *added, *words[end:]]

    return change


HOLES = {
    "network": adding("--share-net"),
    "writing": adding("--bind", "/var/tmp", "/var/tmp"),
    "secrets": adding("--ro-bind", "/etc", "/etc"),
    "processes": lambda words: [
        part
        for word in words
        for part in (
            ["--unshare-ipc", "--unshare-net", "--unshare-uts"]
            if word == "--unshare-all"
            else [word]
        )
    ],
    "calls": lambda words: [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--seccomp" not in (before, word)
    ],
    "privileges": lambda words: [
        "CAP_SYS_ADMIN"
        if before == "--cap-drop"
        else ("--cap-add" if word == "--cap-drop" else word)
        for before, word in zip(["", *words], words, strict=False)
    ],
}


def escapes_of(sandbox: Sandbox, probe: str) -> str:
    """What one probe gets out of a sandbox; the others are not made."""
    with bait() as given:
        given["readable"] = sandbox.readable
        found: dict[str, str] = {}
        note(found, probe, lambda: answer(sandbox, probe, given))
    return found.get(probe, "")


def test_a_sandbox_that_cannot_be_made_proves_nothing():
    """Cause: probes that never ran would have found nothing."""
    assert {*try_to_escape(Sandbox("/bin/false"))} >= {"network", "secrets", "kernel", "outliving"}


def test_every_probe_fails_to_get_out(sandbox, monkeypatch):
    monkeypatch.setattr(escape_attempts, "PROBED_WITHIN_S", 120.0)  # others keep this machine busy
    assert try_to_escape(sandbox) == {}


@pytest.mark.parametrize("probe", HOLES)
def test_a_hole_is_found(sandbox, probe):
    leaky = hole(HOLES[probe])(sandbox.program, sandbox.readable)
    assert escapes_of(leaky, probe)
    assert not escapes_of(sandbox, probe)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write the kernel's settings")
def test_settings_of_the_kernel_cannot_be_written(sandbox):
    """Cause: under root, a child without capabilities opened core_pattern for writing."""
    leaky = hole(adding("--proc", "/proc"))(sandbox.program, sandbox.readable)
    assert "/proc/sys/" in escapes_of(leaky, "kernel")
    assert not escapes_of(sandbox, "kernel")


def test_memory_shared_among_children_is_stopped(sandbox):
    wanted = {"way": "children", "bytes": 2 * escape_attempts.ALLOWED_BYTES, "allowed": 0}
    assert not overstepping(sandbox, wanted)


def test_what_outlives_its_parent_is_found(monkeypatch):
    monkeypatch.setattr("stagewright.api.sandbox.child.end_all", lambda pid: os.kill(pid, 9))
    monkeypatch.setattr(escape_attempts, "GONE_WITHIN_S", 0.2)
    assert left_behind(None, f"a-test-of-{os.getpid()}") == ["left a process running"]
