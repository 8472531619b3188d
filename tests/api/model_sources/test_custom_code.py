"""Code of strangers: off, refused where the sandbox does not hold, and kept inside where it does.

The probes are tried against sandboxes with one hole each: a self-test that finds nothing says
little unless it finds those.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.api.auth.principal import Principal
from stagewright.api.errors import Forbidden
from stagewright.api.model_sources import measure
from stagewright.api.model_sources.custom_code import ForeignModels
from stagewright.api.model_sources.measure import MeasuringSetup, measure_confined
from stagewright.api.sandbox import self_test
from stagewright.api.sandbox.bubblewrap import Sandbox, find_sandbox
from stagewright.api.sandbox.cgroups import find_cgroups
from stagewright.api.sandbox.child import run_confined
from stagewright.api.sandbox.limits import ChildLimits
from stagewright.api.sandbox.self_test import Cell, proven_cell, try_to_escape
from stagewright.api.server import serve
from stagewright.core.errors import InvalidInput, MeasurementError, OutOfMemory, Refused
from stagewright.core.requests.requests import MeasureRequest
from stagewright.profiler.measure_worker import measure_here
from stagewright.profiler.untrusted_worker import measure_foreign

CODE = """
import torch
def build():
    print("talk on standard output is no answer")
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
"""
SAMPLE = {"inputs": {"input": {"shape": [4, 8]}}}


def request_to_measure(source: str = CODE) -> MeasureRequest:
    return MeasureRequest.model_validate(
        {"code": {"source": source}, "sample": SAMPLE, "profiling": {"budget_s": 0.1}}
    )


@pytest.fixture(scope="module")
def cell() -> Cell:
    """What code is run in; how it is refused where this cannot be had is tested everywhere."""
    try:
        return Cell(find_sandbox(), find_cgroups())
    except Refused as error:
        pytest.skip(f"no cell for code can be had here: {error}")


class WithHole(Sandbox):
    """A sandbox that leaves something out, or adds something."""

    def around(self, command, environment):
        words = super().around(command, environment)
        return self.changed(words)


def hole(change):
    """A class of sandboxes whose command line is changed."""
    return type("Hole", (WithHole,), {"changed": staticmethod(change)})


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
    "privileges": lambda words: [
        "CAP_SYS_ADMIN"
        if before == "--cap-drop"
        else ("--cap-add" if word == "--cap-drop" else word)
        for before, word in zip(["", *words], words, strict=False)
    ],
}


def escapes_of(cell: Cell, probe: str) -> str:
    """What one probe gets out of a cell; the others are not made."""
    with self_test._bait() as given:
        given["readable"] = cell.sandbox.readable if cell.sandbox else ()
        found: dict[str, str] = {}
        self_test._note(found, probe, lambda: self_test._answer(cell, probe, given))
    return found.get(probe, "")


def test_it_is_off_and_says_what_would_allow_it(make_client):
    body = {"code": {"source": CODE}, "sample": SAMPLE}
    client = make_client()
    for path, further in (("/v1/plans", {"cluster": "2xcpu"}), ("/v1/profile-jobs", {})):
        response = client.post(path, json={**body, **further})
        assert response.status_code == 403, response.text
        assert response.json()["type"].endswith(":code-not-allowed")
        assert "--allow-code" in response.json()["detail"]
    tiers = {tier["name"]: tier for tier in client.get("/v1/capabilities").json()["models"]}
    assert tiers["code"]["runs_code"] == "the sender's"
    assert not tiers["code"]["available"]


def test_a_worker_refuses_it_too():
    setup = MeasuringSetup(("never run",), 60.0, sandbox="off")
    with pytest.raises(InvalidInput, match="does not run clients' code"):
        measure_confined(request_to_measure(), setup)


def test_without_the_scope_it_is_refused():
    foreign = ForeignModels(allow_code=True)
    with pytest.raises(Forbidden, match="the scope 'code'"):
        foreign.check(
            Principal(scopes=frozenset({"measure", "plan", "read"})), request_to_measure()
        )
    foreign.check(Principal(scopes=frozenset({"code"})), request_to_measure())


@pytest.fixture
def fresh():
    proven_cell.cache_clear()
    find_sandbox.cache_clear()
    yield
    proven_cell.cache_clear()
    find_sandbox.cache_clear()


def test_a_server_does_not_start_without_a_sandbox(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=r"code cannot be run here .*bwrap\) is not installed"):
        serve(port=0, allow_code=True)
    with pytest.raises(Refused, match="install your system's 'bubblewrap'"):
        serve(port=0, sandbox="required")
    assert not list(tmp_path.iterdir())


def test_a_server_does_not_start_where_a_probe_gets_out(fresh, monkeypatch):
    monkeypatch.setattr(self_test, "find_sandbox", lambda: Sandbox("/bin/true"))
    monkeypatch.setattr(self_test, "find_cgroups", lambda: None)
    monkeypatch.setattr(
        self_test, "_answer", lambda cell, probe, *_, **__: ["out"] if probe == "secrets" else []
    )
    monkeypatch.setattr(self_test, "_left_behind", lambda *_: [])
    with pytest.raises(Refused, match=r"does not hold on this machine \(secrets: out\)"):
        proven_cell()


def test_a_sandbox_that_cannot_be_made_proves_nothing(monkeypatch):
    """Cause: probes that never ran would have found nothing."""
    broken = Cell(Sandbox("/bin/false"), None)
    assert {*try_to_escape(broken)} >= {"network", "secrets", "forking", "outliving"}


def test_every_probe_fails_to_get_out(cell, monkeypatch):
    monkeypatch.setattr(self_test, "PROBED_WITHIN_S", 120.0)  # others keep this machine busy
    assert try_to_escape(cell) == {}


@pytest.mark.parametrize("probe", HOLES)
def test_a_hole_is_found(cell, probe):
    leaky = hole(HOLES[probe])(cell.sandbox.program, cell.sandbox.readable)
    assert escapes_of(replace(cell, sandbox=leaky), probe)
    assert not escapes_of(cell, probe)


def test_memory_that_no_process_maps_is_found(cell):
    """Watching processes misses files in memory; without control groups code stays off."""
    wanted = {"way": "files", "bytes": 2 * self_test.ALLOWED_BYTES}
    wanted["allowed"] = self_test.ALLOWED_BYTES
    assert self_test._overstepping(Cell(cell.sandbox, None), wanted)
    assert not self_test._overstepping(cell, wanted)


def test_what_outlives_its_parent_is_found(monkeypatch):
    monkeypatch.setattr("stagewright.api.sandbox.child.end_all", lambda pid: os.kill(pid, 9))
    monkeypatch.setattr(self_test, "GONE_WITHIN_S", 0.2)
    found = self_test._left_behind(Cell(None, None), f"a-test-of-{os.getpid()}")
    assert found == ["left a process running"]


def test_code_is_measured_in_the_cell(cell, monkeypatch):
    monkeypatch.setattr(measure, "proven_cell", lambda: cell)
    setup = MeasuringSetup(("never run",), 60.0, allow_code=True)
    profile = measure_confined(request_to_measure(), setup)
    assert [layer.layer.name for layer in profile.layers] == ["0", "1"]


def test_what_the_code_answers_instead_of_a_profile_is_its_own_fault(cell, monkeypatch):
    monkeypatch.setattr(measure, "proven_cell", lambda: cell)
    monkeypatch.setattr(measure, "FOREIGN_COMMAND", (sys.executable, "-c", "print('{}')"))
    setup = MeasuringSetup(("never run",), 60.0, allow_code=True)
    with pytest.raises(MeasurementError, match="ended its process before it was measured"):
        measure_confined(request_to_measure(), setup)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("def build(): return 3", InvalidInput, "returned a int, not an nn.Module"),
        ("def other(): pass", InvalidInput, "no function 'build'"),
        ("raise SystemExit(0)", MeasurementError, "raised SystemExit"),
        ("def build(): raise ValueError('mine')", MeasurementError, "raised ValueError: mine"),
        ("def build(:", MeasurementError, "raised SyntaxError"),
    ],
)
def test_code_that_is_no_model_is_refused(source, error, words):
    """In this process: the code is the test's own."""
    allowed = argparse.Namespace(code=True, factory={}, path=[])
    with pytest.raises(error, match=words):
        measure_foreign(request_to_measure(source), allowed)


def test_the_child_runs_only_what_its_command_line_allows():
    allowed = argparse.Namespace(code=False, factory={}, path=[])
    with pytest.raises(InvalidInput, match="not allowed to run"):
        measure_foreign(request_to_measure("raise AssertionError('ran')"), allowed)
    with pytest.raises(InvalidInput, match="by a service that allows them") as caught:
        measure_here(request_to_measure("raise AssertionError('ran')"))
    assert caught.value.field == "/code"


def test_groups_of_a_server_that_was_killed_are_removed(cell):
    left = Path(cell.cgroups.memory, "stagewright-child-4194305-1")  # no process has that number
    left.mkdir()
    with cell.cgroups.group(2**28) as group:
        assert not left.exists()
        assert Path(group.folders[0]).exists()
    assert not Path(group.folders[0]).exists()


def test_the_kernel_ends_what_takes_too_much(cell):
    program = "import os\nkept = os.memfd_create('x')\nwhile True: os.write(kept, b'x' * 2**20)"
    with pytest.raises(OutOfMemory):
        run_confined(
            [sys.executable, "-I", "-S", "-c", program],
            b"",
            ChildLimits(64 * 2**20, 20.0),
            sandbox=cell.sandbox,
            cgroups=cell.cgroups,
        )
    assert not list(Path(cell.cgroups.memory).glob(f"stagewright-child-{os.getpid()}-*"))
